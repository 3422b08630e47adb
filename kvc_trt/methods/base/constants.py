"""The constants of a policy as plain numbers, which every kind of eviction and selection is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvc_trt.operators.dimensions import stored_pages

Positions = Literal["original", "cache"]
ADDED_LATER = frozenset(("future_positions", "max_conversation_len", "fp8_bounds"))
"""Fields that engines built earlier do not record; they mean their defaults there."""


@dataclass(frozen=True)
class Constants:
    """The numbers of a policy without its kinds, so that a kind can take them without importing what finds kinds.

    Counts are tokens per KV head unless the name says otherwise.
    """

    policy: str
    prompt_eviction: str
    """Name of the `PromptEviction`."""
    decode_selection: str
    """Name of the `DecodeSelection`."""
    token_budget: int
    max_input_len: int
    max_output_len: int
    capacity: int
    """Cache slots of a compressed layer: the kept prompt tokens and max_output_len; all tokens if nothing is evicted;
    the budget if a step evicts."""
    prompt_budget: int
    """Prompt tokens kept, the observation window included."""
    window: int
    pool_kernel: int
    page_size: int
    top_r: int
    """Channels that score a page."""
    top_k: int
    dense_until: int
    """A row with at most max(token_budget, dense_until) tokens is attended densely."""
    skip_layers: int
    """The first layers keep the full cache and attend densely."""
    split: str | float
    layer_budgets: tuple[int, ...] | None = None
    """If layers differ: prompt_budget of each layer (capacity for a policy that evicts while decoding)."""
    sinks: int = 0
    """First tokens of a prompt that are never evicted."""
    recent: int = 0
    """Last tokens that are never evicted while decoding."""
    positions: Positions = "original"
    """The unit of a cached key's rotary position: tokens of the text, or entries of the cache."""
    per_query_head: bool = False
    """True if each query head chooses its own tokens instead of sharing them with its group."""
    reallocate: bool = False
    """True if the mean value receives the attention share of unread tokens."""
    retrieval_heads: tuple[tuple[bool, ...], ...] | None = None
    """Per layer and KV head: whether it keeps every token; the others keep only sinks and recent tokens."""
    squeeze_share: float | None = None
    """If layer budgets are set per prompt: the share of prompt_budget that unimportant layers keep."""
    future_positions: int = 0
    """Positions after a prompt whose expected queries decide what is kept; 0 if the prompt's own queries decide."""
    max_conversation_len: int = 0
    """Logical positions of a conversation of several turns; 0: those of one prompt and one answer."""

    fp8_bounds: bool = False
    """True if page bounds are stored in fp8, rounded so that none promises less."""

    @property
    def max_sequence_len(self) -> int:
        """S: the longest conversation, at least the longest prompt and everything generated after it."""
        return max(self.max_conversation_len, self.max_input_len + self.max_output_len)

    @property
    def most_kept(self) -> int:
        """Prompt tokens that a layer has room for: twice the budget if budgets are set per prompt."""
        return self.prompt_budget if self.squeeze_share is None else min(2 * self.prompt_budget, self.max_input_len)

    def num_pages(self) -> int:
        """Pages of a compressed layer, the last one possibly partial."""
        return -(-self.capacity // self.page_size)

    def stored_pages(self, dtype: str) -> int:
        """P: the pages that a compressed layer's bounds have room for, if its cache is of this type."""
        from kvc_trt.models.dtypes import numpy_dtype

        return stored_pages(self.capacity, self.page_size, numpy_dtype(dtype).itemsize, self.fp8_bounds)
