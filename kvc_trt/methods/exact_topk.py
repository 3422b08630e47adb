"""Exact top-k: what a perfect selection would read. An oracle, for comparison only.

RocketKV's upper bound (arXiv 2502.14051, appendix A.3): every step scores all cached tokens exactly, for free by its
accounting, and attends to the best `token_budget` of them. `exact-topk` lets each query head choose, as the released
code does, so the heads of a group may together read more than the budget; `exact-topk-group` takes one list by the sum
of the group's probabilities.

It reads the whole cache to find out what it need not have read, so it saves nothing and there is no engine of it: the
reference alone runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.methods.full import compact
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, Request, constants

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import LayerCache, Selection

__all__ = ["compact", "resolve", "select"]

SUMMARY = "oracle: read the tokens that really matter most, found by reading them all (reference only)"
SOURCE = "RocketKV appendix A.3, arXiv 2502.14051"
PROMPT_EVICTION = "none"
DECODE_SELECTION = "exact-topk"
OVERRIDES = ("top_k", "dense_until", *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """The whole budget is attended; a policy named `...-group` shares one list among the heads of a group."""
    return constants(
        request, "none", "exact-topk",
        capacity=request.sequence,
        top_k=request.value("top_k", request.budget),
        dense_until=request.value("dense_until", request.budget),
        per_query_head=not request.policy.endswith("-group"),
    )  # fmt: skip


def select(query: Tensor, cache: LayerCache, parameters: PolicyParameters) -> Selection:
    """The best `top_k` tokens by exact attention; `selected` is [B,H,k] where each query head chooses, else [B,G,k]."""
    from kvc_trt import reference

    return reference.exact_topk(
        query, cache.keys, cache.values, cache.lengths,
        top_k=parameters.top_k, dense_until=parameters.dense_limit, per_query_head=parameters.per_query_head,
    )  # fmt: skip
