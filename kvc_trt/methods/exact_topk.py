"""Exact top-k: the tokens that a perfect selection would read. An oracle, for comparison only.

RocketKV's upper bound (arXiv 2502.14051, appendix A.3): every step scores all cached tokens exactly, at no cost in its
accounting, and attends to the best `token_budget` of them. In `exact-topk` each query head chooses, as in the released
code, so the heads of a group together may read more than the budget; `exact-topk-group` uses one list per group, by
the sum of its probabilities.

It reads the whole cache to find out what to read, so it saves nothing, and only the reference runs it: there are no
engines with it. A turn of a conversation attends exactly to everything and is appended.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from kvc_trt import reference
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Formula, Policy
from kvc_trt.methods.full import NOTHING

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import LayerCache, Selection


class ExactTopK(DecodeSelection):
    """Select the tokens that matter most, found by reading all of them."""

    name = "exact-topk"
    reads_a_part = True
    oracle = True

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        """Attend to the best `top_k` tokens by exact attention.

        `selected` is [B,H,k] if each query head chooses, otherwise [B,G,k]."""
        return reference.exact_topk(
            query, cache.keys, cache.values, cache.lengths,
            top_k=rule.top_k, dense_until=max(rule.token_budget, rule.dense_until), per_query_head=rule.per_query_head,
        )  # fmt: skip

    @override
    def describe(self, rule: Constants) -> str:
        whose = "each query head its own" if rule.per_query_head else "one list per KV head"
        return f"the best, found by reading all of them, {whose}"


def resolve(inputs: PolicyInputs, *, per_query_head: bool) -> PolicyParameters:
    """Attend to the whole budget; each query head has its own list, or the heads of a group share one."""
    return constants(
        inputs, NOTHING, EXACT_TOP_K,
        capacity=inputs.sequence,
        top_k=inputs.value("top_k", inputs.budget),
        dense_until=inputs.value("dense_until", inputs.budget),
        per_query_head=per_query_head,
    )  # fmt: skip


def _policy(name: str, summary: str, *, per_query_head: bool) -> Policy:
    return Policy(
        name=name,
        summary=summary,
        source="RocketKV appendix A.3, arXiv 2502.14051",
        eviction=NOTHING,
        selection=EXACT_TOP_K,
        resolve=partial(resolve, per_query_head=per_query_head),
        overrides=("top_k", "dense_until", *EVERY_POLICY),
        published=Formula(lambda c: 1.0, lambda c: 1 / c),
    )


EXACT_TOP_K = ExactTopK()
EACH_HEAD = _policy(
    "exact-topk",
    "oracle: read the tokens that really matter most, found by reading them all (reference only)",
    per_query_head=True,
)
EACH_GROUP = _policy(
    "exact-topk-group", "oracle: exact-topk with one list for the heads of a group", per_query_head=False
)
