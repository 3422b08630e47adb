"""Quest: each query head reads the pages with the highest bounds (arXiv 2406.10774).

Nothing is evicted. A page is 16 consecutive slots; its score for one query head is the largest product that any key
within the page's bounds could have with the query. A step attends exactly to t div 16 pages, the newest one always
among them; the first two layers, and rows that fit the token budget t, are attended densely. A turn of a conversation
attends exactly to everything and is appended.

Shapes: query [B,H,D], keys and values [B,G,C,D], bounds [B,G,P,D]; `selected` is [B,H,k], one list per query head.

Deviations: reading the bounds is not counted in the budget (as in the original; `quest-matched` counts it). The newest
page is one of the t div 16, as in the original's kernels; its evaluation code takes at least three pages and lets the
newest one compete. Scores are float32, ties go to the lower page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Formula, Policy
from kvc_trt.methods.full import NOTHING
from kvc_trt.methods.rankings.pages import bounds_of_pages, steps_of_bounds, together
from kvc_trt.methods.rankings.ranking import ChosenList, Step, StepRanking
from kvc_trt.methods.rankings.rounding import BoundedScores, Float64, off_by
from kvc_trt.operators.attention.quest_attention import QUEST_ATTENTION

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import LayerCache, Selection

PAGE_SIZE = 16
SKIPPED_LAYERS = 2


@dataclass(frozen=True)
class ByPageBounds(StepRanking):
    """Whole pages ranked for each query head by the bounds of their keys; the newest one is always read."""

    page_size: int
    fp8_bounds: bool = False

    @override
    def explain(self, inputs: Step, chosen: ChosenList, slack: float) -> str | None:
        """Judge which pages are read, each of them whole."""
        m, page_size = inputs.stored(chosen), self.page_size
        pages, counts = np.unique(chosen.taken // page_size, return_counts=True)
        cut = pages[counts < np.minimum(page_size, m - pages * page_size)]
        newest = (m - 1) // page_size
        if cut.size or newest not in pages:
            return f"page {cut[0]} is not read whole" if cut.size else f"the newest page, {newest}, must be read"
        scores = self.scores(inputs.queries_of(chosen)[0], inputs.keys_of(chosen), slack)
        return chosen.instead("read", scores.without_last().unexplained(pages[:-1]))

    def scores(self, query: Float64, keys: Float64, slack: float) -> BoundedScores:
        """Score the pages of one query head: query [D], keys [m, D].

        A page's score is the product of the query with the farthest corner of the page. With e and f for how far q and
        a key are off, it moves by e |corner| + |q| sqrt(sum of f^2 over the page's keys): on each channel the corner
        moves by no more than some key of the page does. In fp8 it moves on each channel by as much as the rounded bound
        (`steps_of_bounds`).
        """
        starts = np.arange(0, len(keys), self.page_size)
        low, high = bounds_of_pages(keys, starts, self.fp8_bounds)
        exact = np.maximum(query * low, query * high).sum(-1)
        corner = np.linalg.norm(np.maximum(np.abs(low), np.abs(high)), axis=-1)
        keys_off = together(off_by(keys, slack), starts)
        if self.fp8_bounds:
            by_keys = np.maximum(*steps_of_bounds(keys, starts, keys_off)) @ np.abs(query)
        else:
            by_keys = np.linalg.norm(query) * keys_off
        return BoundedScores.within(exact, off_by(query, slack) * corner + by_keys)


class PagesPerQueryHead(DecodeSelection):
    """Select the pages with the highest bounds for each query head, and the newest page."""

    name = "quest"
    any_softmax = True
    operators = (QUEST_ATTENTION,)
    reads_a_part = True

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        if cache.page_min is None or cache.page_max is None:
            raise ValueError("page_min and page_max are missing; expected the bounds of every page [B,G,P,D]")
        read = reference.quest_attention(
            query, cache.keys, cache.values, cache.lengths, cache.page_min, cache.page_max,
            page_size=rule.page_size, top_k=rule.top_k, token_budget=rule.token_budget, dense_until=rule.dense_until,
            softmax=cache.softmax,
        )  # fmt: skip
        return reference.Selection(*read)

    @override
    def pairs_to_choose(self, rule: Constants, entries: int, head_size: int) -> float:
        """Count maximum and minimum of every channel of every page."""
        return float(-(-entries // rule.page_size))

    @override
    def describe(self, rule: Constants) -> str:
        bounds = ", bounds in fp8" if rule.fp8_bounds else ""
        return f"whole pages of {rule.page_size}, each query head its own{bounds}"

    @override
    def ranking(self, rule: Constants) -> ByPageBounds:
        """Return the ranking of pages for each query head."""
        return ByPageBounds(rule.page_size, rule.fp8_bounds)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive the whole pages that fit in the budget; InputError if none fits."""
    page_size = inputs.value("page_size", PAGE_SIZE)
    tokens = inputs.value("top_k", inputs.budget)
    if tokens < page_size:
        raise InputError(
            f"policy {inputs.policy} reads whole pages of {page_size} tokens; expected a budget of at least one page, "
            f"found {tokens}",
            hint=f"--token-budget {page_size} or --set page_size={tokens}",
        )
    return constants(
        inputs, NOTHING, PAGES_PER_QUERY_HEAD,
        capacity=inputs.sequence,
        page_size=page_size,
        top_k=tokens // page_size * page_size,
        dense_until=inputs.value("dense_until", inputs.budget),
        skip_layers=inputs.value("skip_layers", min(SKIPPED_LAYERS, inputs.model.num_hidden_layers)),
        per_query_head=True,
    )  # fmt: skip


PAGES_PER_QUERY_HEAD = PagesPerQueryHead()
TABLE_1 = Formula(lambda c: 1 + 1 / c, lambda c: 1 / c)
QUEST = Policy(
    name="quest",
    summary="keep every token, read the pages whose bounds promise most",
    source="Quest, arXiv 2406.10774",
    eviction=NOTHING,
    selection=PAGES_PER_QUERY_HEAD,
    resolve=resolve,
    overrides=("page_size", "top_k", "dense_until", "fp8_bounds", *EVERY_POLICY),
    published=TABLE_1,
)
