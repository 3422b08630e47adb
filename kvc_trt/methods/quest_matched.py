"""Quest at a matched budget: the baseline of the RocketKV paper (arXiv 2502.14051, appendix A.3; Quest: 2406.10774).

A step spends half of the token budget t on scores and half on attention: pages of ceil(S/t) tokens are scored by all
channels of their bounds, the scores are accumulated over the query heads of a group, and the floor(t/2) best tokens are
read. That is hybrid attention with every channel, so there is no operator of its own.

Deviations: the paper does not say how scores are accumulated; ours is hybrid attention's rule (the group shares the
sign of its summed query, mean over the group of each head's softmax over tokens), which for one query head per KV head
ranks pages as Quest does. The newest page competes like any other; dense when it fits; scores are float32.
"""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.methods.full import compact
from kvc_trt.methods.hybrid import select, select_from_pages
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, Request

__all__ = ["compact", "resolve", "select"]

SUMMARY = "score pages by all channels of their bounds, at the budget of the other methods"
SOURCE = "Quest, arXiv 2406.10774, as RocketKV's baseline"
PROMPT_EVICTION = "none"
DECODE_SELECTION = "hybrid"
OVERRIDES = ("page_size", "top_k", "dense_until", *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """S/p vectors of bounds are t of them, or t/2 pairs: p = ceil(S/t)."""
    page_size = request.value("page_size", -(-request.sequence // request.budget))
    parameters = select_from_pages(
        request, "none", capacity=request.sequence, prompt_budget=request.max_input_len, pool_kernel=1
    )
    return replace(parameters, page_size=page_size, top_r=request.model.head_size)
