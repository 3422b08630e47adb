"""Traffic of a policy from its parameters alone: the tokens and bytes that it stores and that one decode step reads.

The unit is the pair: one key and one value of one KV head (Ribar et al. 2023 and the RocketKV paper count traffic so).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvc_trt.contexts.packing import context_bytes
from kvc_trt.graph.state import CacheSite, cache_heads, cache_sites, linear_state, state_tensors
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.attention.heavy_hitter_attention import SLOT_POSITIONS
from kvc_trt.operators.linear.tokens import STATE as LINEAR_STATE
from kvc_trt.operators.tensors import BOUNDS, VECTOR_PARTS

_STATE_KINDS = {
    BOUNDS.name: "page bounds",
    SLOT_POSITIONS.name: "positions",
    **dict.fromkeys((one.name for one in LINEAR_STATE), "linear state"),
}
"""Name of a state tensor -> its kind of memory, except for the parts of keys and values."""


def entries_cached(parameters: PolicyParameters, layer: int, prompt_tokens: int, generated: int = 0) -> int:
    """Tokens one layer's cache (its first, if it has several) holds after a prompt and `generated` further tokens."""
    return _entries(parameters.groups(layer)[0].parameters, prompt_tokens, generated)


def entries_by_cache(model: ModelConfig, parameters: PolicyParameters, prompt_tokens: int) -> list[int]:
    """Return the tokens in every cache after a prompt, in the order of the rows of `cache_lengths`."""
    return [_entries(site.parameters, prompt_tokens, 0) for site in cache_sites(model, parameters)]


def _entries(rule: PolicyParameters, prompt_tokens: int, generated: int) -> int:
    kept = rule.kept_of(prompt_tokens) if rule.eviction.evicts else prompt_tokens
    return min(kept + generated, rule.capacity)


def _pairs(rule: PolicyParameters, entries: int, head_size: int, itemsize: int) -> float:
    """Return the pairs that are attended to plus those read to choose them.

    A pair has the size that the cache's format gives it; reads that choose tokens count by their share of that."""
    if entries <= rule.dense_limit:
        return float(entries)
    chosen_by = rule.selection.pairs_to_choose(rule, entries, head_size)
    element = 1 if rule.fp8_bounds or (rule.cache_format.keys and not rule.has_pages) else itemsize
    pair = rule.cache_format.bytes_per_token(head_size, itemsize)
    numbers = rule.selection.numbers_to_choose(rule, entries, head_size)
    return min(rule.most_read, entries) + (2 * head_size * element * chosen_by + numbers) / pair


def _distinct_layers(model: ModelConfig, parameters: PolicyParameters) -> tuple[ModelConfig, int]:
    """Return a model of one layer and how many are like it; the model itself and 1 where layers differ.

    A search for a budget counts a row's bytes hundreds of times.
    """
    by_layer = parameters.layer_budgets, parameters.retrieval_heads, parameters.layer_windows
    alike = not (parameters.skip_layers or parameters.linear_layers) and all(one is None for one in by_layer)
    return (replace(model, num_hidden_layers=1), model.num_hidden_layers) if alike else (model, 1)


@dataclass(frozen=True)
class RowTraffic:
    """Cache traffic of one row per decode step."""

    entries: int
    """Tokens cached in a compressed layer: the last one that does not slide, or the first where all do."""
    pairs: float
    """Pairs per KV head read in that layer."""
    bytes: float
    """Bytes of cache and page bounds read over all layers, and of the state of linear layers read and written."""


def row_traffic(
    model: ModelConfig, parameters: PolicyParameters, itemsize: int, prompt_tokens: int, generated: int = 0
) -> RowTraffic:
    """Return the cache traffic of one row in one decode step, without the append of one token (under 0.1%).

    A linear layer stores its whole state anew in every step, so that is counted twice: read and written.
    Quest and exact top-k choose for each query head; as in the papers' accounting, one list per KV head is counted.
    """
    total, entries, pairs = 2.0 * linear_bytes(model, itemsize), 0, 0.0
    part, times = _distinct_layers(model, parameters)
    for site in cache_sites(part, parameters):
        stored = _entries(site.parameters, prompt_tokens, generated)
        read = _pairs(site.parameters, stored, model.head_size, itemsize)
        pair = site.parameters.cache_format.bytes_per_token(model.head_size, itemsize)
        total += times * read * cache_heads(model, site) * pair
        if not site.parameters.slides or not entries:
            entries, pairs = stored, read
    return RowTraffic(entries, pairs, total)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes allocated for one row of a batch."""

    keys_values: int
    """Keys and values, or their codes."""
    scales: int
    """Scales, exponents and minima of a cache format."""
    page_bounds: int
    """Bytes of page bounds and other state: scores, positions, a second copy of the keys, linear layers' state."""

    @property
    def total(self) -> int:
        """Bytes of keys, values, their scales, and other state."""
        return self.keys_values + self.scales + self.page_bounds


def cache_bytes(model: ModelConfig, parameters: PolicyParameters, itemsize: int, *, turns: bool = False) -> CacheBytes:
    """Return the bytes of one row's caches at full capacity, from the engine's list of state tensors.

    With `turns`, those of an engine that takes turns, which knows the positions of its slots."""
    keys_values = scales = others = 0
    part, times = _distinct_layers(model, parameters)
    for tensor in state_tensors(part, parameters, "float32" if itemsize == 4 else "float16", turns=turns):
        kind = tensor.name.partition(".")[0]
        if kind in ("k_cache", "v_cache"):
            keys_values += tensor.bytes_per_row()
        elif kind in VECTOR_PARTS:
            scales += tensor.bytes_per_row()
        else:
            others += tensor.bytes_per_row()
    return CacheBytes(times * keys_values, times * scales, times * others)


def state_kind(tensor: str) -> str:
    """Return the kind of memory that a state tensor belongs to, by the name that tables give it."""
    name = tensor.partition(".")[0]
    if name in VECTOR_PARTS:
        return "cache"
    return _STATE_KINDS.get(name, "other state")


def stored_context_bytes(
    model: ModelConfig, parameters: PolicyParameters, itemsize: int, prompt_tokens: int, *, turns: bool
) -> int:
    """Return the bytes of a stored context of a prompt, which are also those of a shared prefix.

    With `turns` it is that of an engine that takes turns: positions of slots are part of it.
    """
    dtype = "float32" if itemsize == 4 else "float16"
    state = state_tensors(model, parameters, dtype, turns=turns)
    return context_bytes(model, parameters, state, entries_by_cache(model, parameters, prompt_tokens), prompt_tokens)


def full_cache_bytes(model: ModelConfig, max_sequence_len: int, itemsize: int, kv_cache: str = AUTO) -> int:
    """Return the bytes of one row's caches in a format if every token is kept that the model attends to.

    Those are all of the longest sequence, and in a sliding layer those of its window. A linear layer has no cache."""
    token = CACHE_FORMATS[kv_cache].bytes_per_token(model.head_size, itemsize)
    windows = model.windows(max_sequence_len) or (0,) * model.num_hidden_layers
    with_caches = (window for layer, window in enumerate(windows) if model.attention(layer).linear is None)
    tokens = sum(window or max_sequence_len for window in with_caches)
    return tokens * model.num_key_value_heads * token


def full_state_bytes(model: ModelConfig, max_sequence_len: int, itemsize: int, kv_cache: str = AUTO) -> int:
    """Return `full_cache_bytes` and the state of linear layers."""
    return full_cache_bytes(model, max_sequence_len, itemsize, kv_cache) + linear_bytes(model, itemsize)


def full_step_bytes(model: ModelConfig, max_sequence_len: int, itemsize: int, kv_cache: str = AUTO) -> int:
    """Return the bytes that a step of one row moves if every token is kept that the model attends to.

    It reads `full_cache_bytes`, and reads and writes the state of linear layers."""
    return full_cache_bytes(model, max_sequence_len, itemsize, kv_cache) + 2 * linear_bytes(model, itemsize)


def linear_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes of one row's state of linear layers."""
    return sum(tensor.bytes_per_row() for tensor in linear_state(model, "float32" if itemsize == 4 else "float16"))


def layer_caches(model: ModelConfig, parameters: PolicyParameters) -> list[list[dict[str, Any]]]:
    """Return the caches of each layer as plain data: `heads` stored, each with `slots`; none of a linear layer."""

    def cache(site: CacheSite) -> dict[str, Any]:
        return {"heads": cache_heads(model, site), "slots": site.parameters.capacity}

    found: list[list[dict[str, Any]]] = [[] for _ in range(model.num_hidden_layers)]
    for site in cache_sites(model, parameters):
        found[site.layer].append(cache(site))
    return found
