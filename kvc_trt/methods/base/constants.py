"""The constants of a policy as plain numbers, which every kind of eviction and selection is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from kvc_trt.methods.base.rocketkv_budget import budgets_by_length
from kvc_trt.methods.base.token_budget import UP_TO_ROUNDING, budgets_by_share
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS, CacheFormat
from kvc_trt.operators.dimensions import INT32_MAX, stored_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Positions = Literal["original", "cache"]
PoolKind = Literal["max", "avg"]
Name = Annotated[str, Field(min_length=1, max_length=100)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
Share = Annotated[float, Field(ge=0, le=1)]
Split = Annotated[str, Field(pattern="^(adaptive|even)$")] | Share
Budgets = Annotated[tuple[Positive, ...], Field(max_length=1024)]
Heads = Annotated[tuple[bool, ...], Field(max_length=1024)]
DEFAULT_CAP, LARGEST_CAP = 2.0, 1024.0
CacheFormatName = Annotated[str, Field(pattern=f"^({'|'.join(CACHE_FORMATS)})$")]
ADDED_LATER = frozenset(
    (
        "future_positions", "max_conversation_len", "fp8_bounds", "kv_cache", "by_length", "long_prompt",
        "short_pool_kernel", "pool_kind", "prompt_share", "squeeze_cap", "layer_windows",
        "linear_layers",
    )
)  # fmt: skip
"""Fields that engines built earlier do not record; they mean their defaults there."""


@dataclass(frozen=True)
class Constants:
    """The numbers of a policy without its kinds, so that a kind can take them without importing the registry of kinds.

    Counts are tokens per KV head unless the name says otherwise. The ranges hold for the numbers that an engine
    records.
    """

    policy: Name
    prompt_eviction: Name
    """The name of the `PromptEviction`."""
    decode_selection: Name
    """The name of the `DecodeSelection`."""
    token_budget: Positive
    max_input_len: Positive
    max_output_len: Positive
    capacity: Positive
    """Cache slots of a compressed layer: the kept prompt tokens and max_output_len; all tokens if nothing is evicted;
    the budget if a step evicts."""
    prompt_budget: Positive
    """Prompt tokens kept, the observation window included; with `by_length` the most that any prompt keeps."""
    window: Positive
    pool_kernel: Positive
    page_size: Positive
    top_r: Positive
    """Channels that score a page."""
    top_k: Positive
    dense_until: Count
    """A row with at most max(token_budget, dense_until) tokens is attended densely."""
    skip_layers: Count
    """The first layers keep the full cache and attend densely."""
    split: Split
    layer_budgets: Budgets | None = None
    """If layers differ: prompt_budget of each layer (capacity for a policy that evicts while decoding)."""
    sinks: Count = 0
    """First tokens of a prompt that are never evicted."""
    recent: Count = 0
    """Last tokens that are never evicted while decoding, or that hybrid attention reads in any case."""
    positions: Positions = "original"
    """The unit of a cached key's rotary position: tokens of the text, or entries of the cache."""
    per_query_head: bool = False
    """True if each query head chooses its own tokens instead of sharing them with its group."""
    reallocate: bool = False
    """True if the mean value receives the attention share of unread tokens."""
    retrieval_heads: Annotated[tuple[Heads, ...], Field(max_length=1024)] | None = None
    """Per layer and KV head: whether it keeps every token; the others keep only sinks and recent tokens."""
    squeeze_share: Share | None = None
    """If layer budgets are set per prompt: the share of prompt_budget that unimportant layers keep."""
    future_positions: Count = 0
    """Positions after a prompt whose expected queries decide which tokens are kept; 0 if the prompt's own queries
    decide."""
    max_conversation_len: Count = 0
    """Logical positions of a conversation of several turns; 0: those of one prompt and one answer."""

    fp8_bounds: bool = False
    """True if page bounds are stored in fp8, rounded so that none promises less."""
    kv_cache: CacheFormatName = AUTO
    """The format of the cache (`models/cache_formats.py`), the same for all caches of an engine."""
    by_length: bool = False
    """True if the kept tokens and the pool kernel follow from each prompt's own length, not from the engine's
    longest."""
    long_prompt: Count = 0
    """With `by_length`: the length from which `pool_kernel` holds; `short_pool_kernel` holds below it."""
    short_pool_kernel: Count = 0
    """0 where every prompt is pooled by `pool_kernel`."""
    pool_kind: PoolKind = "max"
    """The pooling of the last queries' votes over neighbours: their maximum or their average."""
    prompt_share: Share = 0.0
    """With `by_length`: the share that a prompt keeps of its tokens before the window; 0 where the token budget and the
    split say how many it keeps."""
    squeeze_cap: Annotated[float, Field(ge=1, le=LARGEST_CAP)] = DEFAULT_CAP
    """If layer budgets are set per prompt: the most that a layer may keep, in prompt budgets."""
    layer_windows: Annotated[tuple[Count, ...], Field(max_length=1024)] | None = None
    """If some layers of the model slide: the window of each of these, 0 for those that the policy compresses."""
    linear_layers: Annotated[tuple[Count, ...], Field(max_length=1024)] | None = None
    """If some layers of the model have no cache of tokens (`Attention.linear`): these."""

    @property
    def cache_format(self) -> CacheFormat:
        """The format in which the cache stores keys and values."""
        return CACHE_FORMATS[self.kv_cache]

    @property
    def max_sequence_len(self) -> int:
        """S: the longest conversation, at least the longest prompt and everything generated after it."""
        return max(self.max_conversation_len, self.max_input_len + self.max_output_len)

    @property
    def most_kept(self) -> int:
        """Prompt tokens that a layer has room for: several times the budget if budgets are set per prompt."""
        if self.squeeze_share is None:
            return self.prompt_budget
        return min(int(self.squeeze_cap * self.prompt_budget * UP_TO_ROUNDING), self.max_input_len)

    @property
    def budgets(self) -> NDArray[np.int64]:
        """With `by_length`: the tokens that a prompt of n tokens keeps, INT64 [max_input_len + 1]."""
        import numpy as np

        if self.prompt_share:
            own = budgets_by_share(self.max_input_len, self.prompt_share, self.window)
        else:
            derived = self.max_input_len, self.token_budget, self.max_output_len, self.split, self.window
            own = budgets_by_length(*derived)
        return np.minimum(own, self.prompt_budget)

    @property
    def budgets_of_turns(self) -> NDArray[np.int64]:
        """With `by_length`: the most that a conversation of n tokens keeps after a turn, INT64 [max_input_len + 1].

        It never falls, and is never less than an earlier prompt or turn has kept."""
        import numpy as np

        return np.maximum.accumulate(self.budgets)

    def kept_of(self, prompt_tokens: int) -> int:
        """Return the tokens that a prompt of this length keeps."""
        if not self.by_length:
            return min(prompt_tokens, self.prompt_budget)
        return int(self.budgets[min(prompt_tokens, self.max_input_len)])

    def kept_after(self, tokens: int) -> int:
        """Return the most that a conversation of this length keeps after a turn."""
        if not self.by_length:
            return self.prompt_budget
        return int(self.budgets_of_turns[min(tokens, self.max_input_len)])

    @property
    def longest_whole(self) -> int:
        """The length up to which a prompt is kept whole."""
        if not self.by_length:
            return self.prompt_budget
        kept = self.budgets.tolist()
        return next((n - 1 for n, count in enumerate(kept) if count < n), self.max_input_len)

    def pool_kernel_of(self, tokens: int) -> int:
        """Return the pool kernel of a prompt or a conversation of this length."""
        return self.short_pool_kernel if tokens < self.long_prompt else self.pool_kernel

    def num_pages(self) -> int:
        """Pages of a compressed layer, the last one possibly partial."""
        return -(-self.capacity // self.page_size)

    def stored_pages(self, dtype: str) -> int:
        """P: the pages that a compressed layer's bounds have room for, if its cache is of this type."""
        from kvc_trt.models.dtypes import numpy_dtype

        return stored_pages(self.capacity, self.page_size, numpy_dtype(dtype).itemsize, self.fp8_bounds)
