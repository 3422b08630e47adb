"""KvcCompactAverage, its form for turns and its ranked form: average-pooling, against the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.operators.compaction.compact import COMPACT, COMPACT_AVERAGE, COMPACT_AVERAGE_TURN
from kvc_trt.operators.compaction.ranked import COMPACT_AVERAGE_RANKED
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.reference.compaction import scores
from tests.graph.small_models import SingleNode
from tests.operators.test_compact import inputs
from tests.rows_by_length import CAPACITY, KERNELS, PAGE_SIZE, PROMPT_BUDGET, Rows, check, drawn_rows, mixed_rows

ATTRIBUTES = {"prompt_budget": PROMPT_BUDGET, "capacity": CAPACITY, "page_size": PAGE_SIZE, "fp8_bounds": 0}


@lru_cache
def body_of(operator_name: str, kernel: int = KERNELS[1], *, by_length: bool = True) -> SingleNode:
    """The body of an operator; by length with the two kernels of `tests.rows_by_length`, of which `kernel` is one."""
    numbers = {"pool_kernel": kernel, "short_pool_kernel": KERNELS[0] if by_length else 0}
    layout = Layout(HeadShape(None, None, 0), by_length=by_length, numbers=numbers)
    operator = {one.name: one for one in (COMPACT_AVERAGE, COMPACT_AVERAGE_TURN)}[operator_name]
    own = {"by_length": 1} if by_length else {}
    return SingleNode(operator.body(layout), {**ATTRIBUTES, "pool_kernel": kernel, **own})


def run(rows: Rows) -> dict[str, np.ndarray]:
    return body_of(rows.operator.name).named(rows.inputs)


def averaged(rows: Rows) -> Rows:
    return replace(rows, pool_kind="avg")


@pytest.mark.parametrize("of_turn", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_of_different_lengths_equal_the_reference(of_turn: bool, kv_heads: int) -> None:
    rows = averaged(mixed_rows(of_turn=of_turn, kv_heads=kv_heads))
    check(rows, run(rows))


@settings(max_examples=40, deadline=None)
@given(drawn_rows())
def test_random_rows_equal_the_reference(rows: Rows) -> None:
    check(averaged(rows), run(averaged(rows)))


@settings(max_examples=20, deadline=None)
@given(st.integers(9, 120), st.sampled_from([1, 3, 5, 31, 511]), st.integers(0, 10_000))
def test_sums_are_the_references_to_the_bit(length: int, kernel: int, seed: int) -> None:
    """Votes of equal bits give sums of equal bits, so lists differ only where votes do."""
    query, keys, _, lengths = map(torch.from_numpy, inputs((length,), seed=seed))
    votes = scores(query, keys, lengths, pool_kernel=1).values
    expected = scores(query, keys, lengths, pool_kernel=kernel, pool_kind="avg").values
    found = sums_of(votes.where(votes >= 0, -1.0).numpy(), kernel)
    np.testing.assert_array_equal(found[..., : length - 8], expected[..., : length - 8].numpy())


def sums_of(observed: np.ndarray, kernel: int) -> np.ndarray:
    import onnxruntime
    from onnx import TensorProto, helper

    from kvc_trt.operators.compaction.compact import sum_pool
    from kvc_trt.operators.emitter import Emitter

    emit = Emitter()
    result = sum_pool(emit, "observed", kernel)
    given_, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 3) for name in ("observed", result))
    graph = helper.make_graph(emit.nodes, "sums", [given_], [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"observed": observed})[0]


def equal_keys() -> list[np.ndarray]:
    arrays = inputs((100,), seed=1)
    arrays[1][:] = 1.0
    return arrays


EQUAL_KEYS_KEEP = [*range(2, 34), *range(92, 100)]
"""Kept of 100 equal tokens at budget 40, window 8, kernel 5: the first two positions lack one or two of five votes."""


def test_equal_votes_give_equal_sums_and_the_ends_lack_some() -> None:
    found = body_of("KvcCompactAverage", 5, by_length=False)(*equal_keys())
    np.testing.assert_array_equal(found["indices"][0, :, :40], [EQUAL_KEYS_KEEP] * 2)


def test_a_kernel_of_one_keeps_what_maxima_keep() -> None:
    arrays = inputs((150, 60), seed=3)
    layout = Layout(HeadShape(None, None, 0), numbers={"pool_kernel": 1})
    maxima = SingleNode(COMPACT.body(layout), {**ATTRIBUTES, "pool_kernel": 1})(*arrays)
    for name, found in body_of("KvcCompactAverage", 1, by_length=False)(*arrays).items():
        np.testing.assert_array_equal(found, maxima[name])


def test_nan_queries_rank_below_every_number() -> None:
    arrays = inputs((100,), seed=5)
    arrays[0][0, 0] = np.nan  # one head of the first group: all its scores become NaN
    found = body_of("KvcCompactAverage", 5, by_length=False)(*arrays)["indices"]
    tensors = [torch.from_numpy(array) for array in arrays]
    expected = reference.compact(*tensors, prompt_budget=40, pool_kernel=5, pool_kind="avg").indices
    np.testing.assert_array_equal(found[:, :, :40], expected)
    np.testing.assert_array_equal(found[0, 0, :32], np.arange(32))


def test_ranks_are_nested() -> None:
    """The lowest ranks of the ranked form are what the reference keeps to any smaller budget."""
    layout = Layout(HeadShape(None, None, 0), numbers={"pool_kernel": 5})
    arrays = inputs((90,), seed=2)
    ranked = SingleNode(COMPACT_AVERAGE_RANKED.body(layout), {"prompt_budget": 40})(*arrays)
    tensors = [torch.from_numpy(array) for array in arrays]
    for budget in (8, 17, 40):
        expected = reference.compact(*tensors, prompt_budget=budget, pool_kernel=5, pool_kind="avg").indices
        for head in range(2):
            kept = ranked["kept"][0, head][ranked["ranks"][0, head] < budget]
            np.testing.assert_array_equal(kept, expected[0, head])
