"""Quest: read the pages whose bounds promise most, each query head for itself (arXiv 2406.10774).

Nothing is evicted. A page is 16 consecutive slots; its score for one query head is the largest product that any key
within the page's bounds could have with the query. A step attends exactly to t div 16 pages, the newest one always
among them; the first two layers, and rows that fit the token budget t, are attended densely.

Shapes: query [B,H,D], keys and values [B,G,C,D], bounds [B,G,P,D]; `selected` is [B,H,k], one list per query head.

Deviations: reading the bounds is not counted in the budget (as in the original; `quest-matched` counts it). The newest
page is one of the t div 16, as in the original's kernels; its evaluation code takes at least three pages and lets the
newest one compete. Scores are float32, ties go to the lower page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.methods.full import compact
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, Request, constants

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import LayerCache, Selection

__all__ = ["compact", "resolve", "select"]

SUMMARY = "keep every token, read the pages whose bounds promise most"
SOURCE = "Quest, arXiv 2406.10774"
PROMPT_EVICTION = "none"
DECODE_SELECTION = "quest"
OVERRIDES = ("page_size", "top_k", "dense_until", *EVERY_POLICY)

PAGE_SIZE = 16
SKIPPED_LAYERS = 2


def resolve(request: Request) -> PolicyParameters:
    """As many whole pages as the budget holds. InputError where it holds none."""
    page_size = request.value("page_size", PAGE_SIZE)
    tokens = request.value("top_k", request.budget)
    if tokens < page_size:
        raise InputError(
            f"policy {request.policy} reads whole pages of {page_size} tokens; expected a budget of at least one page, "
            f"found {tokens}",
            hint=f"--token-budget {page_size} or --set page_size={tokens}",
        )
    return constants(
        request, "none", "quest",
        capacity=request.sequence,
        page_size=page_size,
        top_k=tokens // page_size * page_size,
        dense_until=request.value("dense_until", request.budget),
        skip_layers=request.value("skip_layers", min(SKIPPED_LAYERS, request.model.num_hidden_layers)),
        per_query_head=True,
    )  # fmt: skip


def select(query: Tensor, cache: LayerCache, parameters: PolicyParameters) -> Selection:
    """One step over the best pages: the output and the tokens that each query head read."""
    from kvc_trt import reference

    if cache.page_min is None or cache.page_max is None:
        raise ValueError("page_min and page_max are missing; expected the bounds of every page [B,G,P,D]")
    read = reference.quest_attention(
        query, cache.keys, cache.values, cache.lengths, cache.page_min, cache.page_max,
        page_size=parameters.page_size, top_k=parameters.top_k,
        token_budget=parameters.token_budget, dense_until=parameters.dense_until,
    )  # fmt: skip
    return reference.Selection(*read)
