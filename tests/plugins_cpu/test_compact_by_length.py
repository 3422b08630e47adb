"""KvcCompact and KvcCompactTurn by the native library, whose rows have budgets and pool kernels of their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from tests.operators import test_compact_by_length as bodies
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode
from tests.rows_by_length import PROMPT_BUDGET, Rows, check, drawn_rows, mixed_rows


@cache
def node_of(operator: str, library: Path, threads: int) -> NativeNode:
    body = bodies.body_of(operator)
    return NativeNode(body.body, body.attributes, library, threads)


def run(rows: Rows, library: Path, threads: int = 1) -> dict[str, np.ndarray]:
    return node_of(rows.operator.name, library, threads).named(rows.inputs)


@pytest.mark.pairwise
@pytest.mark.parametrize("of_turn", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_different_lengths_equal_the_reference(
    library: Path, instructions: str, of_turn: bool, rounded: bool, kv_heads: int, threads: int
) -> None:
    rows = mixed_rows(of_turn=of_turn, rounded=rounded, kv_heads=kv_heads)
    found, by_body = run(rows, library, threads), bodies.run(rows)
    check(rows, found)
    if rounded:
        np.testing.assert_array_equal(found["indices"], by_body["indices"])


@settings(max_examples=60, deadline=None)
@given(drawn_rows(), ANY_INSTRUCTIONS)
def test_random_rows_equal_the_reference(library: Path, rows: Rows, instructions: str) -> None:
    """Rounded inputs repeat whole rows of scores, so that the tie rule decides."""
    use_at_most(library, instructions)
    check(rows, run(rows, library))


def test_a_number_out_of_range_is_the_nearest_that_is_allowed(library: Path, instructions: str) -> None:
    use_at_most(library, instructions)
    rows = mixed_rows(lengths=(90, 70, 80), budgets=(-3, 1000, 20), kernels=(-7, 999, 6))
    near = mixed_rows(lengths=(90, 70, 80), budgets=(8, PROMPT_BUDGET, 20), kernels=(1, 31, 5))
    for found, expected in zip(run(rows, library).values(), run(near, library).values(), strict=True):
        np.testing.assert_array_equal(found, expected)
