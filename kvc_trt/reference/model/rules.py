"""The rules of a policy for a decoder: its numbers per cache, the tokens to keep and the tokens to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvc_trt.reference.cache import LayerCache, Selection
from kvc_trt.reference.compaction import Compacted
from kvc_trt.reference.softmax import PLAIN, Observed, Softmax
from kvc_trt.reference.turn import Turn


class PromptQueries(NamedTuple):
    """The queries of prompts, and the rotary tables."""

    window: Tensor
    """[B,H,W,D]: the last W queries of each row after RoPE, right-aligned; zeros before them."""
    plain: Callable[[], Tensor]
    """Returns [B,H,S,D]: all queries before RoPE, position i in row i; zeros past a row's end."""
    rotary_tables: tuple[Tensor, Tensor]
    """Cosine and sine of every position, [L,D/2]."""
    softmax: Softmax = PLAIN
    """The softmax that the attention of these heads applies to its logits."""

    @property
    def observed(self) -> Tensor | Observed:
        """Return the last queries, with the softmax where it is not plain, for compaction to observe."""
        return self.window if self.softmax.plain else Observed(self.window, self.softmax)


class Rule(Protocol):
    """The numbers of a policy, or of one of its caches (`PolicyParameters`)."""

    @property
    def policy(self) -> str:
        """The name of the policy; a cache with another policy's name is neither compacted nor read in part."""

    @property
    def max_input_len(self) -> int:
        """Tokens of the longest prompt."""

    @property
    def max_sequence_len(self) -> int:
        """Tokens of the longest prompt and everything generated after it."""

    @property
    def capacity(self) -> int:
        """Slots of a cache."""

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens that are kept."""

    @property
    def most_kept(self) -> int:
        """Prompt tokens that a cache has room for."""

    @property
    def window(self) -> int:
        """The number of last queries of a prompt that decide which tokens are kept."""

    @property
    def page_size(self) -> int:
        """Consecutive slots that share bounds."""

    @property
    def fp8_bounds(self) -> bool:
        """True if the bounds of pages are kept in fp8."""

    @property
    def kv_cache(self) -> str:
        """The format of the cache, one of `CACHE_FORMATS`."""

    @property
    def has_pages(self) -> bool:
        """True if the cache carries the bounds of its pages."""

    @property
    def sinks(self) -> int:
        """First tokens that are never evicted."""

    @property
    def future_positions(self) -> int:
        """Positions after a prompt at which queries are expected, where these decide which tokens are kept; else 0."""

    @property
    def positions(self) -> str:
        """The positions of the rotary embedding: tokens of the text ("original"), or entries of the cache ("cache")."""

    @property
    def evicts_on_turns(self) -> bool:
        """True if stored and new tokens compete for the slots after a turn; otherwise new ones are appended."""

    @property
    def keeps_whole(self) -> bool:
        """True if every token is kept beside the cache that a step reads, for turns to choose from."""

    @property
    def no_turn(self) -> str | None:
        """The reason why the policy takes no turns; None if it does."""

    @property
    def slides(self) -> bool:
        """True for the cache of a sliding layer, which holds the layer's window: `capacity` tokens."""

    @property
    def evicts_while_decoding(self) -> bool:
        """True if a step drops a token for each that it appends."""

    @property
    def drops_before_append(self) -> bool:
        """True if a step drops the oldest token that is not a sink before it stores the new one."""

    @property
    def skip_layers(self) -> int:
        """The number of first layers that are not compressed."""

    @property
    def division(self) -> LayerDivision | None:
        """The division of budgets among layers for each prompt; None if budgets do not depend on the prompt."""

    def groups(self, layer: int) -> Sequence[HeadGroup]:
        """Return the groups of one layer, one per cache."""

    def observe(self, queries: PromptQueries, prompt_lengths: Tensor) -> Any:
        """Return the statistics or queries of the prompt that compaction uses."""

    def keeping(self, budget: int) -> Rule:
        """Return the same rule with another budget: of a prompt, or of everything if a step evicts."""


class LayerDivision(Protocol):
    """The numbers by which a budget is divided among layers for each prompt."""

    @property
    def budget(self) -> int:
        """Tokens of a layer in the mean."""

    @property
    def share(self) -> float:
        """The part of it that unimportant layers keep."""

    @property
    def least(self) -> int:
        """Tokens that every layer keeps."""

    def room(self, prompt_tokens: int) -> int:
        """Return the most tokens that a layer can keep, after a prompt of `prompt_tokens` tokens."""


class HeadGroup(Protocol):
    """KV heads of one layer that share a cache and a rule."""

    @property
    def kv_heads(self) -> tuple[int, ...] | None:
        """The group's KV heads, ascending; None for all of the layer."""

    @property
    def parameters(self) -> Rule:
        """The rule of this group's cache."""


class Method(Protocol):
    """Decides which tokens of a prompt are kept and which a step reads; `parameters` is the rule of the cache."""

    def compact(
        self, observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: Any
    ) -> Compacted:
        """Compact a prompt's keys and values [B,G,S,D].

        `observed` is the result of `Rule.observe`: the last queries [B,H,W,D], or something else."""

    def compact_turn(self, turn: Turn, parameters: Any) -> Compacted:
        """Compact stored and new tokens after a turn; indices count entries of `turn.keys`."""

    def select(self, query: Tensor, cache: LayerCache, parameters: Any) -> Selection:
        """Attend [B,H,D] to a cache that holds the current token; return the output, the tokens read and the tokens
        kept."""
