from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.models.quantisation import dequantise, quantise
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR, QUANTISED_ROWS
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode

LAYOUT = Layout(HeadShape(4, 2, 16))


def matrix(bits: int, rows: int = 48, columns: int = 96):
    """Return a quantised random matrix and its values."""
    packed, scales = quantise(np.random.default_rng(bits).standard_normal((rows, columns), dtype=np.float32), bits)
    return packed, scales, dequantise(packed, scales, bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_differs_from_float32_by_what_rounding_the_input_costs(bits):
    packed, scales, values = matrix(bits)
    attributes = {"in_features": 96, "out_features": 48, "bits": bits, "block": 32, "wide_input": 0}
    node = SingleNode(QUANTISED_LINEAR.body(LAYOUT), attributes)
    x = np.random.default_rng(1).standard_normal((5, 96), dtype=np.float32)
    found = node(x, packed, scales)["y"]
    steps = np.abs(x).reshape(5, 3, 32).max(axis=2) / 127
    bound = np.repeat(steps / 2, 32, axis=1) @ np.abs(values.T)
    assert (np.abs(found - x @ values.T) <= bound).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_exactly_what_is_stored(bits):
    packed, scales, values = matrix(bits)
    node = SingleNode(QUANTISED_ROWS.body(LAYOUT), {"bits": bits, "block": 32})
    rows = np.array([7, 0, 47, 7])
    np.testing.assert_array_equal(node(rows, packed, scales)["y"], values[rows])
