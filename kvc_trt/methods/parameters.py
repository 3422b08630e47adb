"""The resolved constants of a policy: computed once per engine, stored in it, equal on every executor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

PromptEviction = Literal["none", "snapkv++", "snapkv", "recent", "heavy-hitters"]
DecodeSelection = Literal["dense", "hybrid", "quest", "sparq", "exact-topk", "recent", "heavy-hitters"]
Positions = Literal["original", "cache"]

EVICTING_WHILE_DECODING = ("recent", "heavy-hitters")
"""Decode selections that drop one token for each that they append: their caches never fill up."""

READING_A_PART = ("hybrid", "quest", "sparq", "exact-topk")
"""Decode selections that keep every entry and read some, as long as a row does not fit the budget."""


@dataclass(frozen=True)
class PolicyParameters:
    """Prefill eviction x decode selection, with every derived number (algorithms in docs/policies/).

    Counts are tokens per KV head unless the name says otherwise.
    """

    policy: str
    prompt_eviction: PromptEviction
    decode_selection: DecodeSelection
    token_budget: int
    max_input_len: int
    max_output_len: int
    capacity: int
    """Cache slots of a compressed layer: what is kept of a prompt and max_output_len; every token where nothing is
    evicted; what the budget holds where a step evicts."""
    prompt_budget: int
    """Prompt tokens kept, the observation window included."""
    window: int
    pool_kernel: int
    page_size: int
    top_r: int
    """Channels that take part in scoring a page."""
    top_k: int
    dense_until: int
    """A row with at most max(token_budget, dense_until) tokens is attended densely."""
    skip_layers: int
    """The first layers keep the full cache and attend densely."""
    split: str | float
    layer_budgets: tuple[int, ...] | None = None
    """Where layers differ: prompt_budget of each layer (of a policy that evicts while decoding: capacity)."""
    sinks: int = 0
    """First tokens of a prompt that are never evicted."""
    recent: int = 0
    """Last tokens that are never evicted while decoding."""
    positions: Positions = "original"
    """What the rotary embedding of a cached key counts: tokens of the text, or entries of the cache."""
    per_query_head: bool = False
    """Whether each query head chooses for itself, not the heads of a group together."""
    reallocate: bool = False
    """Whether attention that was not read is given to the mean value."""
    retrieval_heads: tuple[tuple[bool, ...], ...] | None = None
    """Per layer and KV head: whether it keeps every token, where the others keep sinks and recent ones only."""
    squeeze_share: float | None = None
    """Layer budgets are set for each prompt: the share of prompt_budget that unimportant layers keep."""

    @property
    def max_sequence_len(self) -> int:
        """S: the longest prompt and everything generated after it."""
        return self.max_input_len + self.max_output_len

    @property
    def dense_limit(self) -> int:
        """Longest row that is attended densely (rule 7)."""
        if self.decode_selection in ("dense", *EVICTING_WHILE_DECODING):
            return self.capacity
        return max(self.token_budget, self.dense_until)

    @property
    def most_read(self) -> int:
        """Tokens that a step reads of a row that it does not attend to densely."""
        current = 1 if self.decode_selection == "sparq" else 0  # beside the top_k others
        return self.top_k + current

    @property
    def selected_width(self) -> int:
        """Width of the `selected` output."""
        return max(self.most_read, self.dense_limit)

    def groups(self, layer: int) -> tuple[Group, ...]:
        """One layer's caches: one under most policies. What differs between layers is settled in a group."""
        alone = replace(self, skip_layers=0, layer_budgets=None, retrieval_heads=None)
        if layer < self.skip_layers:
            return (Group(None, alone.keeping_everything()),)
        if self.retrieval_heads is not None:
            return alone._by_heads(self.retrieval_heads[layer])
        if self.layer_budgets is None:
            return (Group(None, alone),)
        budget = self.layer_budgets[layer]
        if self.evicts_while_decoding:
            kept, slots, recent = min(budget, self.max_input_len), budget + self.spare_slots, self._recent_of(budget)
            one = replace(alone, token_budget=budget, prompt_budget=kept, capacity=slots, recent=recent)
            return (Group(None, one),)
        return (Group(None, replace(alone, prompt_budget=budget, capacity=budget + self.max_output_len)),)

    def _recent_of(self, budget: int) -> int:
        """Recent tokens of a layer with another budget: all but the sinks, or as large a share as in the others."""
        if self.decode_selection == "recent":
            return budget - self.sinks
        whole = self.capacity - self.spare_slots
        half = self.recent == whole - whole // 2
        return budget - budget // 2 if half else max(1, budget * self.recent // whole)

    def keeping_everything(self) -> PolicyParameters:
        """The same lengths under `full`."""
        length = self.max_sequence_len
        return replace(
            self,
            policy="full",
            prompt_eviction="none",
            decode_selection="dense",
            token_budget=length,
            capacity=length,
            prompt_budget=self.max_input_len,
            page_size=1,
            top_k=length,
            dense_until=length,
            skip_layers=0,
            layer_budgets=None,
            sinks=0,
            recent=0,
            positions="original",
            per_query_head=False,
            reallocate=False,
            retrieval_heads=None,
            squeeze_share=None,
        )

    @property
    def most_kept(self) -> int:
        """Prompt tokens that a layer has room for: twice the budget where it is set for each prompt."""
        return self.prompt_budget if self.squeeze_share is None else min(2 * self.prompt_budget, self.max_input_len)

    def _by_heads(self, retrieval: tuple[bool, ...]) -> tuple[Group, ...]:
        """Heads that keep everything, then the others; one group where all are alike."""
        kept = tuple(head for head, keeps in enumerate(retrieval) if keeps)
        others = tuple(head for head, keeps in enumerate(retrieval) if not keeps)
        whole = self.keeping_everything()
        if kept and others:
            return Group(kept, whole), Group(others, self)
        return (Group(None, whole if kept else self),)

    @property
    def evicts_while_decoding(self) -> bool:
        """Whether a step drops a token for each that it appends, so that caches never fill up."""
        return self.decode_selection in EVICTING_WHILE_DECODING

    @property
    def reads_a_part(self) -> bool:
        """Whether a step reads some entries of a cache that keeps them all."""
        return self.decode_selection in READING_A_PART

    @property
    def spare_slots(self) -> int:
        """Slots beyond the budget: heavy hitters attend to the new token before they drop one."""
        return 1 if self.decode_selection == "heavy-hitters" else 0

    def layer_capacity(self, layer: int) -> int:
        """Cache slots of one layer (of its first group); skipped layers keep the whole sequence."""
        return self.groups(layer)[0].parameters.capacity

    def is_compressed(self, layer: int) -> bool:
        """Whether this layer evicts or selects at all."""
        return any(group.parameters.compresses for group in self.groups(layer))

    @property
    def compresses(self) -> bool:
        """Whether anything is evicted or left unread."""
        return self.prompt_eviction != "none" or self.decode_selection != "dense"

    def num_pages(self) -> int:
        """Pages of a compressed layer, the last one possibly partial."""
        return -(-self.capacity // self.page_size)


class Group(NamedTuple):
    """KV heads of one layer that are stored alike: one cache, one row of a graph's `cache_lengths`."""

    kv_heads: tuple[int, ...] | None
    """Ascending; None is all of them."""
    parameters: PolicyParameters
