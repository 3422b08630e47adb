"""KvcCompact and KvcCompactTurn whose rows have budgets and pool kernels of their own, against the reference."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.operators.compaction.compact import COMPACT, COMPACT_TURN
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode
from tests.rows_by_length import CAPACITY, KERNELS, PAGE_SIZE, PROMPT_BUDGET, Rows, check, drawn_rows, mixed_rows

NUMBERS = {
    "prompt_budget": PROMPT_BUDGET, "capacity": CAPACITY, "pool_kernel": KERNELS[1], "page_size": PAGE_SIZE,
    "fp8_bounds": 0, "by_length": 1,
}  # fmt: skip


@lru_cache
def body_of(operator_name: str) -> SingleNode:
    layout = Layout(
        HeadShape(None, None, 0), by_length=True,
        numbers={"pool_kernel": KERNELS[1], "short_pool_kernel": KERNELS[0]},
    )  # fmt: skip
    return SingleNode({"KvcCompact": COMPACT, "KvcCompactTurn": COMPACT_TURN}[operator_name].body(layout), NUMBERS)


def run(rows: Rows) -> dict[str, np.ndarray]:
    return body_of(rows.operator.name).named(rows.inputs)


@pytest.mark.parametrize("of_turn", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_of_different_lengths_equal_the_reference(of_turn: bool, rounded: bool, kv_heads: int) -> None:
    rows = mixed_rows(of_turn=of_turn, rounded=rounded, kv_heads=kv_heads)
    check(rows, run(rows))


@pytest.mark.parametrize("lengths", [(5,), (PROMPT_BUDGET,), (20, 12, 3)])
def test_rows_that_all_fit_are_copied(lengths: tuple[int, ...]) -> None:
    rows = mixed_rows(lengths=lengths, budgets=lengths)
    found = run(rows)
    check(rows, found)
    assert found["cache_lengths"].tolist() == list(lengths)


@settings(max_examples=60, deadline=None)
@given(drawn_rows())
def test_random_rows_equal_the_reference(rows: Rows) -> None:
    """Rounded inputs repeat whole rows of scores, so that the tie rule decides."""
    check(rows, run(rows))


@given(st.integers(-5, 1000), st.integers(-5, 1000))
@settings(max_examples=20, deadline=None)
def test_a_budget_out_of_range_is_the_nearest_that_is_allowed(first: int, second: int) -> None:
    rows = mixed_rows(lengths=(90, 70), budgets=(first, second))
    window = rows.inputs["q_window"].shape[2]
    allowed = np.clip([first, second], window, PROMPT_BUDGET)
    assert run(rows)["cache_lengths"].tolist() == allowed.tolist()


def test_an_engine_of_one_kernel_pools_all_rows_by_it() -> None:
    layout = Layout(HeadShape(None, None, 0), by_length=True, numbers={"pool_kernel": KERNELS[1]})
    single = SingleNode(COMPACT.body(layout), NUMBERS)
    rows = mixed_rows(kernels=KERNELS[1:] * 5)
    check(rows, single.named(rows.inputs))


def test_budgets_by_length_only_add_two_inputs() -> None:
    assert [one.name for one in COMPACT.attributes if one.name == "by_length"] == []
    added = {one.name for one in COMPACT.with_lengths().inputs} - {one.name for one in COMPACT.inputs}
    assert added == {"prompt_budgets", "pool_kernels"}


def test_the_reference_takes_a_number_for_each_row() -> None:
    """Each row keeps what it keeps alone, where no other's budget or kernel can take the place of its own."""
    rows = mixed_rows()
    together = rows.expected().indices
    for row in range(len(together)):
        alone = rows.expected(rows=slice(row, row + 1)).indices
        assert torch.equal(together[row : row + 1, :, : alone.shape[2]], alone)
        assert bool((together[row, :, alone.shape[2] :] == -1).all())
