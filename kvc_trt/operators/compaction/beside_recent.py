"""Compaction to the last tokens and those of the others that score best: a method writes the score alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from kvc_trt.operators.attention.heavy_hitter_attention import SCORES
from kvc_trt.operators.attention.stored_rows import own_recents
from kvc_trt.operators.compaction.keep_best import among_row, keep_with_scores
from kvc_trt.operators.compaction.scored import OF_TURN, Body, Rank
from kvc_trt.operators.compaction.trim_beside_recent import BUDGETS
from kvc_trt.operators.shapes import Layout, count_to, size
from kvc_trt.operators.vectors import EXACT, Tables, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

Score: TypeAlias = "Callable[[Emitter, Tables], Value]"
"""Writes the score of each token of some tables, FLOAT [B,G,S]."""


def rank_beside_recent(score: Score) -> Rank:
    """Return the rank by `score` in which the last tokens of a row rank highest."""
    return lambda emit, tables: _among(emit, score(emit, tables), by_row=False)


def keep_beside_recent(score: Score) -> Body:
    """Return the body that keeps the last tokens of a prompt and the best of the others, with their scores."""

    def write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
        scores = score(emit, EXACT)
        return keep_with_scores(emit, layout, scores, lambda branch: _among(branch, scores, by_row=False))

    return write


def keep_beside_recent_by_row(score: Score) -> Body:
    """Return the body that does so for stored and new tokens after a turn, with budgets by row, without scores."""

    def write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
        tables = stored_tables(layout, *OF_TURN)
        scores = score(emit, tables)

        def rank(branch: Emitter) -> Value:
            return _among(branch, scores, by_row=True)

        kept = keep_with_scores(emit, layout, scores, rank, tables, BUDGETS.name)
        return {name: value for name, value in kept.items() if name != SCORES.name}

    return write


def _among(emit: Emitter, scores: Value, *, by_row: bool) -> Value:
    rows, columns = emit.Reshape("prompt_lengths", [-1, 1, 1]), count_to(emit, size(emit, "k", 2))
    return among_row(emit, scores, emit.Less(columns, emit.Sub(rows, own_recents(emit, by_row=by_row))))
