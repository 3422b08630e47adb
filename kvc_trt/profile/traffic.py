"""What a policy stores and what one decode step of it reads, in tokens and in bytes, from the parameters alone.

The unit is the pair: one key and one value of one KV head (Ribar et al. 2023 and the RocketKV paper count traffic so).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvc_trt.models.config import ModelConfig
from kvc_trt.policies.parameters import PolicyParameters
from kvc_trt.profile.model_size import token_cache_bytes


def entries_cached(parameters: PolicyParameters, layer: int, prompt_tokens: int, generated: int = 0) -> int:
    """Tokens one layer's cache holds for a prompt of that length and `generated` tokens after it."""
    evicts = parameters.is_compressed(layer) and parameters.prompt_eviction != "none"
    kept = min(prompt_tokens, parameters.prompt_budget) if evicts else prompt_tokens
    return min(kept + generated, parameters.layer_capacity(layer))


def pairs_read(parameters: PolicyParameters, layer: int, entries: int, head_size: int) -> float:
    """Pairs per KV head that one layer reads in a step when `entries` tokens are cached.

    Hybrid selection reads top_r of head_size channels of one bound per page (half a pair each), then top_k pairs.
    """
    hybrid = parameters.is_compressed(layer) and parameters.decode_selection == "hybrid"
    if not hybrid or entries <= parameters.dense_limit:
        return float(entries)
    pages = -(-entries // parameters.page_size)
    return pages * parameters.top_r / (2 * head_size) + min(parameters.top_k, entries)


@dataclass(frozen=True)
class RowTraffic:
    """What one row costs per decode step, summed over layers."""

    entries: int
    """Tokens cached in a compressed layer (the last layer)."""
    pairs: float
    """Pairs per KV head read in a compressed layer (the last layer)."""
    bytes: float
    """Bytes of cache and page bounds read over all layers."""


def row_traffic(
    model: ModelConfig, parameters: PolicyParameters, itemsize: int, prompt_tokens: int, generated: int = 0
) -> RowTraffic:
    """Cache traffic of one row in one decode step; the append of one token is left out (under 0.1%)."""
    total, entries, pairs = 0.0, 0, 0.0
    for layer in range(model.num_hidden_layers):
        entries = entries_cached(parameters, layer, prompt_tokens, generated)
        pairs = pairs_read(parameters, layer, entries, model.head_size)
        total += pairs * token_cache_bytes(model, itemsize)
    return RowTraffic(entries, pairs, total)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes allocated for one row of a batch."""

    keys_values: int
    page_bounds: int

    @property
    def total(self) -> int:
        """Keys, values and page bounds."""
        return self.keys_values + self.page_bounds


def cache_bytes(model: ModelConfig, parameters: PolicyParameters, itemsize: int) -> CacheBytes:
    """Bytes one row's caches take at full capacity: keys and values, and the page bounds where pages are scored."""
    token = token_cache_bytes(model, itemsize)
    slots = sum(parameters.layer_capacity(layer) for layer in range(model.num_hidden_layers))
    paged = [layer for layer in range(model.num_hidden_layers) if _has_bounds(parameters, layer)]
    return CacheBytes(slots * token, len(paged) * parameters.num_pages() * token)


def full_cache_bytes(model: ModelConfig, max_sequence_len: int, itemsize: int) -> int:
    """Bytes one row's caches take when every token of the longest sequence is kept."""
    return model.num_hidden_layers * max_sequence_len * token_cache_bytes(model, itemsize)


def _has_bounds(parameters: PolicyParameters, layer: int) -> bool:
    return parameters.is_compressed(layer) and parameters.decode_selection == "hybrid"
