"""Bounds in fp8: the codes of NumPy and of the ONNX bodies are E5M2 numbers, rounded up."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators import OPSET
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.fp8_bounds import (
    EMPTY,
    LARGEST,
    codes_of,
    raised,
    values_of,
    write_codes,
    write_ranks,
    write_values,
)
from tests.close_bounds import may_be_of_close
from tests.graph.small_models import IR_VERSION, open_session

NUMBERS = np.unique(values_of(np.arange(256, dtype=np.uint8).view(np.int8)))
NUMBERS = NUMBERS[np.isfinite(NUMBERS)]


def every_half() -> np.ndarray:
    return np.arange(65536, dtype=np.uint16).view(np.float16)


def floats() -> np.ndarray:
    """Numbers of every magnitude, and the neighbours of all powers of two, where a logarithm may be off."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = [np.float32(2) ** np.arange(-20, 17, dtype=np.float32)]
    for _ in range(20):
        near = [np.nextafter(near[0], np.float32(0)), *near, np.nextafter(near[-1], np.float32(np.inf))]
    beside = np.concatenate(near)
    return np.concatenate([every_half().astype(np.float32), drawn, beside, -beside, [np.float32(-0.0)]])


def expected(values: np.ndarray) -> np.ndarray:
    wide = np.where(np.isnan(values), LARGEST, values.astype(np.float32))
    return NUMBERS[np.searchsorted(NUMBERS, np.clip(wide, -LARGEST, LARGEST))]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_codes_stand_for_the_smallest_number_that_is_not_below(dtype):
    bits = np.arange(65536, dtype=np.uint16)
    values = bits.view(numpy_dtype(dtype)) if dtype in ("float16", "bfloat16") else floats().astype(dtype)
    found = values_of(codes_of(values))
    np.testing.assert_array_equal(found, expected(values))
    assert not np.signbit(found[found == 0]).any()
    np.testing.assert_array_equal(raised(values), found)


def test_an_empty_page_holds_the_lowest_number():
    assert values_of(np.array([EMPTY])) == -LARGEST == NUMBERS[0]


def test_a_double_just_above_a_number_takes_the_next():
    just_above = np.float64(1) + 2.0**-40
    assert raised(np.array([1.0, just_above])).tolist() == [1.0, 1.25]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_bodies_write_the_same_codes():
    emit = Emitter()
    codes = write_codes(emit, "x")
    values, ranks = write_values(emit, codes), write_ranks(emit, codes)
    again = emit.cast(write_ranks(emit, ranks), np.int8)
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])]
    named = [helper.make_empty_tensor_value_info(name) for name in (codes, values, ranks, again)]
    graph = helper.make_graph(emit.nodes, "codes", given, named)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    x = floats()
    found, decoded, order, back = open_session(model).run(None, {"x": x})
    np.testing.assert_array_equal(found, codes_of(x))
    np.testing.assert_array_equal(decoded, values_of(found))
    np.testing.assert_array_equal(back, found)
    assert (np.diff(order[np.argsort(decoded, kind="stable")]) >= 0).all()


def test_codes_may_be_of_close_numbers():
    codes = codes_of(NUMBERS)
    for tolerance in (0.0, 1e-3):
        assert may_be_of_close(codes, codes, tolerance)
        assert may_be_of_close(codes[1:], codes[:-1], tolerance)
        assert not may_be_of_close(codes[2:], codes[:-2], tolerance)
    rng = np.random.default_rng(1)
    values = rng.standard_normal(10_000) * 10.0 ** rng.integers(-4, 3, 10_000)
    moved = values + 0.02 * rng.uniform(-1, 1, 10_000)
    assert may_be_of_close(codes_of(moved), codes_of(values), 0.02)
    assert not may_be_of_close(codes_of(moved), codes_of(values), 0.002)
