"""Hybrid attention: RocketKV's second stage alone, on the whole cache (arXiv 2502.14051, section 3.3).

Each step scores pages of consecutive slots from their key bounds on the query's largest channels, then attends exactly
to `top_k` tokens of the best pages; a row that fits the token budget is attended densely.

Deviations: dense when it fits (the released code attends to half the budget even then); pages count over the cache
from slot 0; empty slots of a partial page are +-inf (TensorRT-LLM: 0); a channel sum of exactly 0 takes the minimum;
scores are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.methods.budget import default_channels, default_page_size
from kvc_trt.methods.full import compact
from kvc_trt.methods.parameters import PolicyParameters, PromptEviction
from kvc_trt.methods.request import DEFAULT_WINDOW, EVERY_POLICY, SELECTION, Request, constants

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import LayerCache, Selection

__all__ = ["compact", "resolve", "select"]

SUMMARY = "keep every token, read the most promising ones"
SOURCE = "RocketKV stage 2, arXiv 2502.14051"
PROMPT_EVICTION = "none"
DECODE_SELECTION = "hybrid"
OVERRIDES = (*SELECTION, *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """The whole budget's compression falls to the decode step: pages are larger, channels fewer than RocketKV's."""
    return select_from_pages(
        request, "none", capacity=request.sequence, prompt_budget=request.max_input_len, pool_kernel=1
    )


def select_from_pages(
    request: Request, eviction: PromptEviction, *, capacity: int, prompt_budget: int, pool_kernel: int
) -> PolicyParameters:
    """Parameters of hybrid attention over a cache of `capacity` slots, however those were chosen."""
    page_size = request.value("page_size", default_page_size(capacity, request.budget))
    channels = default_channels(capacity, request.budget, page_size, request.model.head_size)
    return constants(
        request, eviction, "hybrid",
        capacity=capacity,
        prompt_budget=prompt_budget,
        window=request.value("window", DEFAULT_WINDOW),
        pool_kernel=pool_kernel,
        page_size=page_size,
        top_r=request.value("top_r", channels),
        top_k=request.value("top_k", request.budget // 2),
        dense_until=request.value("dense_until", request.budget),
    )  # fmt: skip


def select(query: Tensor, cache: LayerCache, parameters: PolicyParameters) -> Selection:
    """One step of hybrid attention: the output and the tokens it read."""
    from kvc_trt import reference

    if cache.page_min is None or cache.page_max is None:
        raise ValueError("page_min and page_max are missing; expected the bounds of every page [B,G,P,D]")
    read = reference.hybrid_attention(
        query, cache.keys, cache.values, cache.lengths, cache.page_min, cache.page_max,
        page_size=parameters.page_size, top_r=parameters.top_r, top_k=parameters.top_k,
        token_budget=parameters.token_budget, dense_until=parameters.dense_until,
    )  # fmt: skip
    return reference.Selection(*read)
