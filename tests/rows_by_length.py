"""Batches whose rows have budgets and pool kernels of their own, and what the reference keeps of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch

from kvc_trt import reference
from kvc_trt.kernels import reference_ops
from kvc_trt.methods.base.constants import PoolKind
from kvc_trt.operators.compaction.compact import COMPACT, COMPACT_AVERAGE, COMPACT_AVERAGE_TURN, COMPACT_TURN
from kvc_trt.operators.schema import Operator
from kvc_trt.reference.turn import compact_turn
from tests.near_ties import compare_compaction

HEADS, SIZE, WINDOW = 4, 16, 8
PROMPT_BUDGET, CAPACITY, PAGE_SIZE = 40, 60, 3
KERNELS = (5, 31)
LENGTHS, BUDGETS = (200, 61, 40, 33, 1), (17, 40, 25, 40, 1)
"""Rows that lose many tokens and few, one that fits, and one shorter than the window."""


@dataclass(frozen=True)
class Rows:
    """The inputs of KvcCompact, or with `window_lengths` of KvcCompactTurn, whose rows differ."""

    inputs: dict[str, np.ndarray]
    pool_kind: PoolKind = "max"

    @property
    def operator(self) -> Operator:
        of_prompts, of_turns = (
            (COMPACT, COMPACT_TURN) if self.pool_kind == "max" else (COMPACT_AVERAGE, COMPACT_AVERAGE_TURN)
        )
        return of_turns if "window_lengths" in self.inputs else of_prompts

    def expected(self, rows: slice = slice(None)) -> reference.Compacted:
        """Return the reference's compaction of some of the rows."""
        tensors = {name: torch.from_numpy(array[rows]) for name, array in self.inputs.items()}
        tables = [tensors[name].float() for name in ("q_window", "k", "v")]
        numbers: dict[str, Any] = {"prompt_budget": tensors["prompt_budgets"], "pool_kernel": tensors["pool_kernels"]}
        numbers["pool_kind"] = self.pool_kind
        if "window_lengths" not in self.inputs:
            return reference.compact(*tables, tensors["prompt_lengths"], **numbers)
        return compact_turn(*tables, tensors["prompt_lengths"], tensors["window_lengths"], **numbers)


def mixed_rows(
    *, lengths: tuple[int, ...] = LENGTHS, budgets: tuple[int, ...] = BUDGETS,
    kernels: tuple[int, ...] | None = None, kv_heads: int = 2, rounded: bool = False, of_turn: bool = False,
    seed: int = 0, dtype: Any = np.float32,
) -> Rows:  # fmt: skip
    """Random rows; `rounded` ones repeat scores, so that the tie rule decides."""
    batch, rng = len(lengths), np.random.default_rng(seed)
    longest = max(lengths)
    inputs = {
        "q_window": rng.standard_normal((batch, HEADS, WINDOW, SIZE)),
        "k": rng.standard_normal((batch, kv_heads, longest, SIZE)),
        "v": rng.standard_normal((batch, kv_heads, longest, SIZE)),
    }
    if rounded:
        inputs = {name: np.round(array) for name, array in inputs.items()}
    made = {name: array.astype(dtype) for name, array in inputs.items()}
    made["prompt_lengths"] = np.array(lengths, np.int64)
    if of_turn:
        made["window_lengths"] = np.array([min(n, 1 + 3 * row % WINDOW) for row, n in enumerate(lengths)], np.int64)
    made["prompt_budgets"] = np.array(budgets, np.int64)
    both = KERNELS * batch
    made["pool_kernels"] = np.array((both if kernels is None else kernels)[:batch], np.int64)
    return Rows(made)


@st.composite
def drawn_rows(draw: Any) -> Rows:
    lengths = tuple(draw(st.lists(st.integers(1, 150), min_size=1, max_size=4)))
    budgets = tuple(draw(st.integers(WINDOW, PROMPT_BUDGET)) for _ in lengths)
    kernels = tuple(draw(st.sampled_from(KERNELS)) for _ in lengths)
    of_turn, seed = draw(st.booleans()), draw(st.integers(0, 10_000))
    return mixed_rows(lengths=lengths, budgets=budgets, kernels=kernels, rounded=True, of_turn=of_turn, seed=seed)


def check(rows: Rows, found: dict[str, np.ndarray], *, bounds: bool = True, loose: bool = False) -> None:
    """Hold an executor's outputs to the reference's: lists up to proven near-ties, copies to the bit.

    `loose`: tensor cores have summed the products."""
    given, expected = rows.inputs, rows.expected()
    kept = expected.indices.shape[2]
    indices, lengths = found["indices"], np.minimum(given["prompt_lengths"], given["prompt_budgets"])
    np.testing.assert_array_equal(found["cache_lengths"], lengths)
    np.testing.assert_array_equal(indices[:, :, kept:], -1)
    voting = given.get("window_lengths", np.full(len(lengths), WINDOW))
    for row, (kernel, count) in enumerate(zip(given["pool_kernels"], voting, strict=True)):
        one = slice(row, row + 1)
        q_window = given["q_window"][one, :, WINDOW - count :]
        tables = q_window, given["k"][one], given["prompt_lengths"][one]
        lists = expected.indices[one].numpy(), indices[one, :, :kept]
        compared = compare_compaction(
            *tables, *lists, pool_kernel=int(kernel), pool_kind=rows.pool_kind, truncates=loose
        )
        assert not compared.wrong, compared.wrong
    where, stored = np.maximum(indices, 0)[..., None], indices[..., None] >= 0
    for name in ("k", "v"):
        moved = np.where(stored, np.take_along_axis(given[name], where, axis=2), 0)
        np.testing.assert_array_equal(found[f"{name}_cache"], moved)
    if bounds:
        cache = torch.from_numpy(found["k_cache"])
        extremes = reference.page_bounds(cache.float(), torch.from_numpy(lengths), PAGE_SIZE)
        made = reference_ops.channel_major(*extremes, cache.dtype).numpy()
        np.testing.assert_array_equal(found["bounds"], made)
