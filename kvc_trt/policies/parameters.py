"""The resolved constants of a policy: computed once per engine, stored in it, equal on every executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PromptEviction = Literal["none", "snapkv++"]
DecodeSelection = Literal["dense", "hybrid"]


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
    """Cache slots of a compressed layer: prompt_budget + max_output_len, or every token where nothing is evicted."""
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

    @property
    def max_sequence_len(self) -> int:
        """S: the longest prompt and everything generated after it."""
        return self.max_input_len + self.max_output_len

    @property
    def dense_limit(self) -> int:
        """Longest row that is attended densely (rule 7)."""
        return max(self.token_budget, self.dense_until) if self.decode_selection == "hybrid" else self.capacity

    @property
    def selected_width(self) -> int:
        """Width of the `selected` output."""
        return max(self.top_k, self.dense_limit)

    def layer_capacity(self, layer: int) -> int:
        """Cache slots of one layer; skipped layers keep the whole sequence."""
        return self.max_sequence_len if layer < self.skip_layers else self.capacity

    def is_compressed(self, layer: int) -> bool:
        """Whether this layer evicts or selects at all."""
        return layer >= self.skip_layers and (self.prompt_eviction != "none" or self.decode_selection != "dense")

    def num_pages(self) -> int:
        """Pages of a compressed layer, the last one possibly partial."""
        return -(-self.capacity // self.page_size)
