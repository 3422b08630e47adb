"""The resolved constants of a policy, computed once per engine and stored in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection, decode_selection
from kvc_trt.methods.base.prompt_eviction import PromptEviction, prompt_eviction
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.dimensions import MAX_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference.model.rules import PromptQueries

DEFAULT = "rocketkv"
"""The default policy of a build."""
BASELINE = "full"
"""The policy that keeps and reads everything, the baseline of all others."""

SLIDING = "sliding layer"
"""Stands for a policy in the parameters of a sliding layer's cache, which no policy chooses."""


@dataclass(frozen=True)
class PolicyParameters(Constants):
    """A prompt eviction and a decode selection with every derived number (algorithms in docs/policies/)."""

    @property
    def eviction(self) -> PromptEviction:
        """The kind that chooses the tokens kept of a prompt."""
        return prompt_eviction(self.prompt_eviction)

    @property
    def selection(self) -> DecodeSelection:
        """The kind that chooses the tokens that a step reads."""
        return decode_selection(self.decode_selection)

    def check(self, model: ModelConfig) -> None:
        """Raise InputError for a kind that no file of this package defines, and for numbers of another model."""
        prompt_eviction(self.prompt_eviction)
        decode_selection(self.decode_selection)
        layers, heads = model.num_hidden_layers, model.num_key_value_heads
        if self.layer_budgets is not None and len(self.layer_budgets) != layers:
            raise InputError(f"layer_budgets has {len(self.layer_budgets)} numbers; expected {layers}, one per layer")
        if self.retrieval_heads is not None and [heads] * layers != list(map(len, self.retrieval_heads)):
            raise InputError(f"retrieval_heads is no table of {layers} layers by {heads} KV heads")
        if self.layer_windows != (windows := model.windows(self.max_sequence_len)):
            raise InputError(f"layer_windows is {self.layer_windows}; expected {windows}, the windows of the model")
        if self.linear_layers != (linear := model.linear_layers or None):
            raise InputError(f"linear_layers is {self.linear_layers}; expected {linear}, as in the model")
        self.check_softmax(model)
        self._check_lengths()
        for name, most in (("skip_layers", layers), ("top_r", model.head_size), ("page_size", self.max_sequence_len)):
            if (found := getattr(self, name)) > most:
                raise InputError(f"{name} is {found}; expected at most {most}")

    def check_softmax(self, model: ModelConfig) -> None:
        """Raise InputError where a kind chooses by a plain softmax, and the model's attention has another."""
        description = model.description
        capped, sinks = description.attention_softcap is not None, description.attention_sinks
        if not capped and not sinks:
            return
        part = "capped logits of attention" if capped else "sinks of attention"
        kinds = (("prompt eviction", self.eviction), ("decode selection", self.selection))
        for kind, one in kinds:
            if not one.any_softmax:
                raise InputError(
                    f"policy {self.policy}: {kind} {one.name} scores tokens without the {part} of "
                    f"{model.architecture}, expected one that knows them",
                    hint="--policy rocketkv",
                )
        if sinks and self.retrieval_heads is not None:
            raise InputError(
                f"policy {self.policy}: heads of a layer are cached apart, and sinks of {model.architecture} are not "
                "divided among them; expected a policy whose caches have all heads of a layer",
                hint="--policy rocketkv",
            )

    def _check_lengths(self) -> None:
        """Raise InputError for numbers by length that no policy derives."""
        if self.prompt_share and not self.by_length:
            raise InputError(f"prompt_share is {self.prompt_share} without by_length; expected both or neither")
        if self.by_length and self.max_input_len > MAX_TOKENS:
            raise InputError(f"max_input_len is {self.max_input_len}; expected at most {MAX_TOKENS} by length")
        if self.short_pool_kernel > self.pool_kernel or (self.short_pool_kernel == 0) != (self.long_prompt == 0):
            raise InputError(
                f"short_pool_kernel is {self.short_pool_kernel}, long_prompt {self.long_prompt}; expected both or "
                f"neither, and at most the pool_kernel of {self.pool_kernel}"
            )

    @property
    def evicts_while_decoding(self) -> bool:
        """True if a step drops a token for each that it appends, so that caches never fill up."""
        return self.selection.evicts_while_decoding

    @property
    def slides(self) -> bool:
        """True for the cache of a sliding layer: a ring that holds the layer's window, which no policy chooses."""
        return self.eviction.slides

    @property
    def evicts_on_turns(self) -> bool:
        """True if stored and new tokens compete for the slots after a turn; otherwise new ones are appended."""
        return self.eviction.evicts

    @property
    def keeps_whole(self) -> bool:
        """True if every token is kept beside the cache that a step reads, so that turns can choose from all."""
        return self.eviction.keeps_whole

    @property
    def slice_limit(self) -> int:
        """The number of entries up to which an engine promises dense results and attends to a slice of the cache."""
        if self.reads_a_part or self.evicts_while_decoding:
            return self.dense_limit
        return self.token_budget if self.eviction.evicts else 0

    @property
    def no_turn(self) -> str | None:
        """The reason why the policy takes no turns; None if it does."""
        if self.squeeze_share is not None and not self.evicts_while_decoding:
            return "layer budgets are measured on a prompt (--layer-budget squeeze-online), and a turn is none"
        return self.eviction.no_turn(self)

    @property
    def no_drafts(self) -> str | None:
        """The reason why the tokens of a draft cannot be checked in one pass; None if they can."""
        if self.layer_windows is not None:
            return "sliding layers of the model drop a token for each that they store, and a rejected one is not undone"
        if self.linear_layers is not None:
            return "the state of linear layers of the model takes in each token, and a rejected one is not undone"
        return self.selection.no_drafts

    @property
    def drops_before_append(self) -> bool:
        """True if a step drops the oldest token that is not a sink before it stores the new one."""
        return self.selection.drops_before_append

    @property
    def reads_a_part(self) -> bool:
        """True if a step reads some entries of a cache that keeps them all."""
        return self.selection.reads_a_part

    @property
    def has_pages(self) -> bool:
        """True if the cache carries the bounds of its pages."""
        return self.selection.pages

    @property
    def spare_slots(self) -> int:
        """The number of slots beyond the budget."""
        return self.selection.spare_slots

    @property
    def keeps_everything(self) -> bool:
        """True if no token is ever evicted; sliding layers evict all before their window."""
        return not (self.eviction.evicts or self.evicts_while_decoding) and self.layer_windows is None

    @property
    def keeps_every_token(self) -> bool:
        """True if a later turn can read every token: none is evicted, or all are kept beside the tokens that steps
        read."""
        return self.keeps_everything or (self.keeps_whole and self.layer_windows is None)

    @property
    def compresses(self) -> bool:
        """True if anything is evicted or left unread."""
        return self.eviction.evicts or self.evicts_while_decoding or self.reads_a_part

    @property
    def chooses(self) -> bool:
        """True if the policy chooses the tokens that are kept or read; a sliding layer's window is the model's."""
        return self.compresses and not self.slides

    @property
    def dense_limit(self) -> int:
        """Longest row that is attended densely (rule 7)."""
        return max(self.token_budget, self.dense_until) if self.reads_a_part else self.capacity

    @property
    def most_read(self) -> int:
        """The number of tokens that a sparse step reads of a row."""
        return self.top_k + self.selection.reads_beside

    @property
    def selected_width(self) -> int:
        """Width of the `selected` output."""
        return max(self.most_read, self.dense_limit)

    def observe(self, queries: PromptQueries, prompt_lengths: Tensor) -> Any:
        """Return the observation of compaction in the reference, such as the last queries."""
        return self.eviction.observe(queries, prompt_lengths, self)

    def groups(self, layer: int) -> tuple[Group, ...]:
        """Return the groups of one layer, one per cache (mostly a single one), with the layer's own numbers.

        A linear layer has none."""
        if self.linear_layers is not None and layer in self.linear_layers:
            return ()
        alone = replace(
            self, skip_layers=0, layer_budgets=None, retrieval_heads=None, layer_windows=None, linear_layers=None
        )
        if self.layer_windows is not None and (window := self.layer_windows[layer]):
            return (Group(None, alone._sliding(window)),)
        if layer < self.skip_layers:
            return (Group(None, alone.keeping_everything()),)
        if self.retrieval_heads is not None:
            return alone._by_heads(self.retrieval_heads[layer])
        if self.layer_budgets is None:
            return (Group(None, alone),)
        return (Group(None, alone.keeping(self.layer_budgets[layer])),)

    def keeping(self, budget: int) -> PolicyParameters:
        """Return the same rule with another budget: of a prompt, or of everything if a step evicts."""
        if self.evicts_while_decoding:
            return self.selection.at_budget(self, budget)
        return replace(self, prompt_budget=budget, capacity=budget + self.max_output_len)

    @property
    def division(self) -> Division | None:
        """The division of a budget among layers for each prompt; None if budgets are known beforehand."""
        if self.squeeze_share is None:
            return None
        if self.evicts_while_decoding:
            most = self.capacity - self.spare_slots
            return Division(self.token_budget, self.squeeze_share, self.sinks + 1, most, of_prompt=False)
        return Division(self.prompt_budget, self.squeeze_share, self.window, self.most_kept, of_prompt=True)

    @property
    def in_the_mean(self) -> PolicyParameters:
        """The rule at the mean of the budgets that rows and layers get, where steps evict; otherwise itself."""
        if self.division is None or not self.evicts_while_decoding:
            return self
        return self.keeping(self.division.budget)

    @property
    @override
    def most_kept(self) -> int:
        if self.evicts_while_decoding and self.squeeze_share is not None:
            return min(self.capacity - self.spare_slots, self.max_input_len)
        return super().most_kept

    def keeping_everything(self) -> PolicyParameters:
        """Return the parameters of the dense twin: the same lengths under `full`."""
        length = self.max_sequence_len
        return PolicyParameters(
            policy=BASELINE,
            prompt_eviction="none",
            decode_selection="dense",
            token_budget=length,
            max_input_len=self.max_input_len,
            max_output_len=self.max_output_len,
            capacity=length,
            prompt_budget=self.max_input_len,
            window=self.window,
            pool_kernel=self.pool_kernel,
            page_size=1,
            top_r=self.top_r,
            top_k=length,
            dense_until=length,
            skip_layers=0,
            split=self.split,
            max_conversation_len=self.max_conversation_len,
            kv_cache=self.kv_cache,
            layer_windows=self.layer_windows,
            linear_layers=self.linear_layers,
        )

    def _sliding(self, window: int) -> PolicyParameters:
        """Return the parameters of a sliding layer's cache: a ring of its last `window` tokens."""
        return replace(
            self.keeping_everything(),
            policy=SLIDING,
            prompt_eviction="layer-window",
            decode_selection="recent",
            token_budget=window,
            capacity=window,
            prompt_budget=min(window, self.max_input_len),
            window=1,
            pool_kernel=1,
            top_k=window,
            dense_until=window,
            recent=window,
        )

    def _by_heads(self, retrieval: tuple[bool, ...]) -> tuple[Group, ...]:
        """Return the group of heads that keep everything, then the others; one group if all are alike."""
        kept = tuple(head for head, keeps in enumerate(retrieval) if keeps)
        others = tuple(head for head, keeps in enumerate(retrieval) if not keeps)
        whole = self.keeping_everything()
        if kept and others:
            return Group(kept, whole), Group(others, self)
        return (Group(None, whole if kept else self),)

    def layer_capacity(self, layer: int) -> int:
        """Return the cache slots of one layer (of its first group); skipped layers keep the whole sequence."""
        return self.groups(layer)[0].parameters.capacity

    def is_compressed(self, layer: int) -> bool:
        """Return whether this layer evicts or selects at all."""
        return any(group.parameters.compresses for group in self.groups(layer))


class Division(NamedTuple):
    """The numbers by which SqueezeAttention (arXiv 2404.04793) divides a budget among layers, for each prompt."""

    budget: int
    """Tokens of a layer in the mean."""
    share: float
    """The part of it that unimportant layers keep: p."""
    least: int
    """Tokens that every layer keeps."""
    most: int
    """Tokens that a layer has room for."""
    of_prompt: bool
    """True if only tokens of the prompt compete for the budget; otherwise those of the answer do too."""

    def room(self, prompt_tokens: int) -> int:
        """Return the most tokens that a layer can keep, after a prompt of `prompt_tokens` tokens."""
        return min(self.most, prompt_tokens) if self.of_prompt else self.most

    @property
    def smallest(self) -> int:
        """Tokens that an unimportant layer keeps."""
        return max(self.least, int(self.budget * self.share))


class Group(NamedTuple):
    """KV heads of one layer that share a cache and a row of `cache_lengths`."""

    kv_heads: tuple[int, ...] | None
    """The KV heads, ascending; None for all of the layer."""
    parameters: PolicyParameters
