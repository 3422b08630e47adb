"""SnapKV as published: each query head keeps its own part of the prompt.

"SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, with the accounting of RocketKV's
appendix (arXiv 2502.14051): the prompt keeps (token budget - new tokens) / group tokens per query head, for the cache
holds one list for each of them.

Shapes: keys and values are repeated to [B,H,C,D], so grouped-query attention saves nothing any more; with one query
head per KV head it is `snapkv-gqa`. Deviations: max-pooling of width 7, as the paper's LongBench runs (the released
code's default is an average of width 5); scores are float32; a prompt of exactly the budget is kept whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, EVICTION, Request
from kvc_trt.methods.snapkv_gqa import POOL_KERNEL
from kvc_trt.methods.snapkv_plus_plus import compact as compact_heads
from kvc_trt.methods.snapkv_plus_plus import evict_then_dense, select

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted

__all__ = ["compact", "resolve", "select"]

SUMMARY = "baseline: each query head keeps its own prompt tokens, the cache is repeated for all of them"
SOURCE = "SnapKV, arXiv 2404.14469"
PROMPT_EVICTION = "snapkv"
DECODE_SELECTION = "dense"
OVERRIDES = (*EVICTION, *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """Prompt budget = (token budget - new tokens) / query heads per KV head."""
    prompt_budget = (request.budget - request.max_output_len) // request.model.group_size
    parameters = evict_then_dense(request, prompt_budget, POOL_KERNEL)
    return replace(parameters, prompt_eviction="snapkv", per_query_head=True)


def compact(
    q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
) -> Compacted:
    """q_window [B,H,W,D], keys, values [B,G,S,D] -> keys and values [B,H,C,D], one list per query head."""
    shared = q_window.shape[1] // keys.shape[1]
    keys, values = (table.repeat_interleave(shared, dim=1) for table in (keys, values))
    return compact_heads(q_window, keys, values, prompt_lengths, parameters)
