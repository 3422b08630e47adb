"""KvcCompactAverage and KvcCompactAverageTurn by the native library: the reference's choices and the body's."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from tests.operators import test_compact_average as bodies
from tests.operators.test_compact import inputs
from tests.operators.test_compact_average import averaged
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode
from tests.rows_by_length import KERNELS, Rows, check, drawn_rows, mixed_rows


@cache
def node_of(
    operator: str, library: Path, threads: int = 1, kernel: int = KERNELS[1], by_length: bool = True
) -> NativeNode:
    body = bodies.body_of(operator, kernel, by_length=by_length)
    return NativeNode(body.body, body.attributes, library, threads)


def run(rows: Rows, library: Path, threads: int = 1) -> dict[str, np.ndarray]:
    return node_of(rows.operator.name, library, threads).named(rows.inputs)


@pytest.mark.pairwise
@pytest.mark.parametrize("of_turn", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_different_lengths_equal_the_reference(
    library: Path, instructions: str, of_turn: bool, kv_heads: int, threads: int
) -> None:
    rows = averaged(mixed_rows(of_turn=of_turn, kv_heads=kv_heads))
    check(rows, run(rows, library, threads))


@settings(max_examples=60, deadline=None)
@given(drawn_rows(), ANY_INSTRUCTIONS)
def test_random_rows_equal_the_reference(library: Path, rows: Rows, instructions: str) -> None:
    use_at_most(library, instructions)
    check(averaged(rows), run(averaged(rows), library))


@pytest.mark.parametrize("kernel", [1, 5, 511])
def test_a_kernel_wider_than_the_prompt_reaches_all_of_it(library: Path, instructions: str, kernel: int) -> None:
    arrays = inputs((150, 60, 41, 9), seed=4)
    found = node_of("KvcCompactAverage", library, kernel=kernel, by_length=False)(*arrays)
    expected = bodies.body_of("KvcCompactAverage", kernel, by_length=False)(*arrays)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])


def test_equal_votes_give_equal_sums_and_the_ends_lack_some(library: Path, instructions: str) -> None:
    found = node_of("KvcCompactAverage", library, kernel=5, by_length=False)(*bodies.equal_keys())
    np.testing.assert_array_equal(found["indices"][0, :, :40], [bodies.EQUAL_KEYS_KEEP] * 2)


def test_nan_ranks_below_every_number_in_its_head_alone(library: Path, instructions: str) -> None:
    arrays = inputs((150,), seed=6)
    arrays[0][0, 1, 3] = np.nan
    found = node_of("KvcCompactAverage", library, kernel=5, by_length=False)(*arrays)
    np.testing.assert_array_equal(
        found["indices"], bodies.body_of("KvcCompactAverage", 5, by_length=False)(*arrays)["indices"]
    )
    np.testing.assert_array_equal(found["indices"][0, 0, :32], np.arange(32))
