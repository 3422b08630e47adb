"""Operators that keep the highest-ranked tokens of a prompt: a method writes the rank, the rest is the same for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from kvc_trt.operators.attention.heavy_hitter_attention import SLOT_POSITIONS
from kvc_trt.operators.compaction.compact import STORED_KEYS, STORED_VALUES, page_bounds
from kvc_trt.operators.compaction.keep_best import keep_best
from kvc_trt.operators.dimensions import MAX_TOKENS
from kvc_trt.operators.schema import Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout
from kvc_trt.operators.tensors import (
    BOUNDS,
    CAPACITY,
    FP8_BOUNDS,
    INDICES,
    K_CACHE,
    PAGE_SIZE,
    PROMPT_KEYS,
    PROMPT_LENGTHS,
    PROMPT_VALUES,
    STORED_LENGTHS,
    V_CACHE,
)
from kvc_trt.operators.vectors import EXACT, Tables, stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

Rank: TypeAlias = "Callable[[Emitter, Tables], Value]"
"""Writes the rank of each token of some tables, FLOAT [B,G,S]: `keep_best.among_row` of a method's scores."""
Body: TypeAlias = "Callable[[Emitter, Layout], Mapping[str, Value]]"
"""Writes an operator's body; returns its outputs by name."""


OF_PROMPT = PROMPT_KEYS, PROMPT_VALUES
OF_TURN = STORED_KEYS, STORED_VALUES


def scored_compaction(
    name: str,
    summary: str,
    rank: Rank,
    *,
    inputs: tuple[Tensor, ...] = (),
    state: Tensor = BOUNDS,
    extra: tuple[Attribute, ...] = (),
    budget: str = "tokens kept per KV head",
    of_turn: bool = False,
) -> Operator:
    """Return the operator that keeps the `prompt_budget` tokens of highest rank.

    They are those of a prompt; with `of_turn` stored and new tokens of a cache that has a format. `inputs` and `extra`
    attributes are those that the rank reads in addition to keys, values and lengths. `state` is the cache's state
    beside keys and values: BOUNDS of pages, or SLOT_POSITIONS, which equal `indices`. `budget` describes the budget.
    """

    def write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
        tables = stored_tables(layout, *OF_TURN) if of_turn else EXACT
        kept = keep_best(emit, layout, lambda branch: rank(branch, tables), tables)
        if state is SLOT_POSITIONS:
            return {**kept.outputs, state.name: emit.Identity(kept.outputs["indices"])}
        return {**kept.outputs, state.name: page_bounds(emit, kept.keys, kept.stored, layout)}

    return compaction(
        name, summary, write, inputs=inputs, state=(state,), extra=extra, budget=budget,
        tables=OF_TURN if of_turn else OF_PROMPT,
    )  # fmt: skip


def compaction(
    name: str,
    summary: str,
    write: Body,
    *,
    inputs: tuple[Tensor, ...],
    state: tuple[Tensor, ...],
    extra: tuple[Attribute, ...] = (),
    budget: str = "tokens kept per KV head",
    tables: tuple[Tensor, Tensor] = OF_PROMPT,
) -> Operator:
    """Return the operator whose body `write` keeps `prompt_budget` tokens, with `state` beside keys and values."""
    paging = (PAGE_SIZE, FP8_BOUNDS) if BOUNDS in state else ()
    return Operator(
        name=name,
        summary=summary,
        inputs=(*inputs, *tables, PROMPT_LENGTHS),
        outputs=(K_CACHE, V_CACHE, *state, STORED_LENGTHS, INDICES),
        attributes=(
            Attribute("prompt_budget", 1, MAX_TOKENS, budget, at_most="capacity"), CAPACITY, *extra, *paging,
        ),
        formulas={"C": "capacity"},
        write=write,
        stores=True,
        native=tables is OF_PROMPT,
    )  # fmt: skip
