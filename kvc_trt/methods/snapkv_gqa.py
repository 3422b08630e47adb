"""SnapKV with one shared list per KV head: the baseline that spends the whole budget on eviction.

"SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, with the grouped accounting of
RocketKV's appendix: the prompt keeps the token budget less the tokens that will be generated, so a step reads at
most the budget.

Deviations from SnapKV: the votes of a group are summed before pooling and the cache keeps its KV heads (the original
selects per query head and repeats keys and values, which multiplies the cache by the group size). Max-pooling, width 7.
"""

from __future__ import annotations

from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, EVICTION, Request
from kvc_trt.methods.snapkv_plus_plus import compact, evict_then_dense, select

__all__ = ["compact", "resolve", "select"]

SUMMARY = "baseline: keep the budget's worth of prompt tokens, then attend densely"
SOURCE = "SnapKV, arXiv 2404.14469"
PROMPT_EVICTION = "snapkv++"
DECODE_SELECTION = "dense"
OVERRIDES = (*EVICTION, *EVERY_POLICY)
POOL_KERNEL = 7


def resolve(request: Request) -> PolicyParameters:
    """Prompt budget = token budget - new tokens."""
    return evict_then_dense(request, request.budget - request.max_output_len, POOL_KERNEL)
