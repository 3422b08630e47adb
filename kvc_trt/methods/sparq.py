"""SparQ attention: score every token by the query's largest channels, read the best (arXiv 2312.04985).

Nothing is evicted. Each step scores every cached token by `top_r` channels, taken where the group's summed |q| is
largest, attends exactly to the current token and the `top_k` others of the best scores, and gives the attention that
their scores leave to the others to the mean value of the cache. Keys are stored twice, the second time channel by
channel, so that r channels are read and no more.

Shapes: query [B,H,D], keys and values [B,G,C,D]; `selected` is [B,G,k+1].

Deviations: the original has no grouped queries; heads of a group share channels and tokens, chosen by the sums over the
group of |q| and of the tempered scores. Budget as in RocketKV, appendix A.3: r D-th parts of m keys are t/2 pairs and
k = floor(t/2); where S > D t even r = 1 exceeds that. Dense when it fits; scores are float32.
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

SUMMARY = "keep every token, score all of them by a few channels, read the best"
SOURCE = "SparQ, arXiv 2312.04985"
PROMPT_EVICTION = "none"
DECODE_SELECTION = "sparq"
OVERRIDES = ("top_r", "top_k", "dense_until", "reallocate", *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """r = D t/S rounded to the nearest channel, at least one."""
    head_size, sequence = request.model.head_size, request.sequence
    nearest = (2 * head_size * request.budget + sequence) // (2 * sequence)
    return constants(
        request, "none", "sparq",
        capacity=sequence,
        top_r=request.value("top_r", min(max(nearest, 1), head_size)),
        top_k=request.value("top_k", request.budget // 2),
        dense_until=request.value("dense_until", request.budget),
        reallocate=request.choice("reallocate", True),
    )  # fmt: skip


def select(query: Tensor, cache: LayerCache, parameters: PolicyParameters) -> Selection:
    """One step over the best tokens: the output and what was read."""
    from kvc_trt import reference

    read = reference.sparq_attention(
        query, cache.keys, cache.values, cache.lengths,
        top_r=parameters.top_r, top_k=parameters.top_k, token_budget=parameters.token_budget,
        dense_until=parameters.dense_until, reallocate=parameters.reallocate,
    )  # fmt: skip
    return reference.Selection(*read)
