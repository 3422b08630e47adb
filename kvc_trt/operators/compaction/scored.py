"""Operators that keep the highest-ranked tokens of a prompt: a method writes the rank, the rest is the same for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from kvc_trt.operators.attention.heavy_hitter_attention import SLOT_POSITIONS
from kvc_trt.operators.compaction.compact import page_bounds
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

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

Rank: TypeAlias = "Callable[[Emitter], Value]"
"""Writes the rank of each token of `k` and `v`, FLOAT [B,G,S]: `keep_best.among_row` of a method's scores."""
Body: TypeAlias = "Callable[[Emitter, Layout], Mapping[str, Value]]"


def scored_compaction(
    name: str,
    summary: str,
    rank: Rank,
    *,
    inputs: tuple[Tensor, ...] = (),
    state: Tensor = BOUNDS,
    extra: tuple[Attribute, ...] = (),
    budget: str = "tokens kept per KV head",
) -> Operator:
    """Return the operator that keeps the `prompt_budget` tokens of highest rank.

    `inputs` and `extra` attributes are those that the rank reads in addition to keys, values and lengths. `state` is
    what the cache carries beside keys and values: BOUNDS of pages, or SLOT_POSITIONS, which equal `indices`. `budget`
    describes the budget.
    """

    def write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
        kept = keep_best(emit, rank)
        if state is SLOT_POSITIONS:
            return {**kept.outputs, state.name: emit.Identity(kept.outputs["indices"])}
        return {**kept.outputs, state.name: page_bounds(emit, kept.keys, kept.stored, layout)}

    return compaction(name, summary, write, inputs=inputs, state=(state,), extra=extra, budget=budget)


def compaction(
    name: str,
    summary: str,
    write: Body,
    *,
    inputs: tuple[Tensor, ...],
    state: tuple[Tensor, ...],
    extra: tuple[Attribute, ...] = (),
    budget: str = "tokens kept per KV head",
) -> Operator:
    """Return the operator whose body `write` keeps `prompt_budget` tokens, with `state` beside keys and values."""
    paging = (PAGE_SIZE, FP8_BOUNDS) if BOUNDS in state else ()
    return Operator(
        name=name,
        summary=summary,
        inputs=(*inputs, PROMPT_KEYS, PROMPT_VALUES, PROMPT_LENGTHS),
        outputs=(K_CACHE, V_CACHE, *state, STORED_LENGTHS, INDICES),
        attributes=(
            Attribute("prompt_budget", 1, MAX_TOKENS, budget, at_most="capacity"), CAPACITY, *extra, *paging,
        ),
        formulas={"C": "capacity"},
        write=write,
    )  # fmt: skip
