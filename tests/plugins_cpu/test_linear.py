"""KvcLinear by the native library: Gemm's results for any shape, thread count and processor; and in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kvc_trt.backends.onnxruntime import native
from kvc_trt.graph import IR_VERSION
from kvc_trt.graph.rewrites.native import prepare_prefill
from kvc_trt.operators import KVC_DOMAIN, OPSET
from kvc_trt.operators.native import NATIVE_LINEAR
from tests.graph.small_models import normal
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import native_session


def gemm(matrix: np.ndarray, bias: np.ndarray | None = None) -> onnx.ModelProto:
    """y = x matrix^T + bias."""
    constants = [numpy_helper.from_array(matrix, "matrix")]
    if bias is not None:
        constants.append(numpy_helper.from_array(bias, "bias"))
    node = helper.make_node("Gemm", ["x", *(one.name for one in constants)], ["y"], transB=1)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", None]) for name in ("x", "y")]
    graph = helper.make_graph([node], "one", values[:1], values[1:], constants)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(KVC_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)


def product(library: Path, x: np.ndarray, model: onnx.ModelProto, *, threads: int = 1, bf16: bool = False):
    loaded = native.load(library)
    prepared = prepare_prefill(model, loaded.operators, bf16=bf16)
    assert prepared.graph.node[0].op_type == NATIVE_LINEAR
    (found,) = native_session(prepared, loaded, threads).run(None, {"x": x})
    return found


def check(found: np.ndarray, x: np.ndarray, matrix: np.ndarray) -> None:
    """Equal to rounding: each of the sums' additions rounds once, float32 by 2^-24."""
    wide, rows = x.astype(np.float64), matrix.astype(np.float64)
    bar = 2.0**-24 * (x.shape[1] + 1) * (np.abs(wide) @ np.abs(rows).T) + 1e-30
    np.testing.assert_array_less(np.abs(found - wide @ rows.T), bar)


@pytest.mark.parametrize(("tokens", "columns", "rows"), [(128, 96, 64), (7, 33, 100), (1, 2100, 17), (70, 1024, 130)])
def test_native_products_equal_exact_ones(
    library: Path, instructions: str, tokens: int, columns: int, rows: int
) -> None:
    x, matrix = normal(0, tokens, columns), normal(1, rows, columns)
    check(product(library, x, gemm(matrix)), x, matrix)


@settings(max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 150), st.integers(1, 150), st.sampled_from([1, 2]), st.integers(0, 1000),
    ANY_INSTRUCTIONS,
)  # fmt: skip
def test_random_shapes_equal_exact_products(
    library: Path, tokens: int, columns: int, rows: int, threads: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    x, matrix = normal(seed, tokens, columns), normal(seed + 1, rows, columns)
    check(product(library, x, gemm(matrix), threads=threads), x, matrix)


def test_products_of_several_chunks_of_tokens_equal_exact_ones(library: Path, instructions: str) -> None:
    x, matrix = normal(0, 4100, 40), normal(1, 20, 40)
    check(product(library, x, gemm(matrix), threads=2), x, matrix)


def test_a_bias_is_added(library: Path, instructions: str) -> None:
    x, matrix, bias = normal(0, 9, 40), normal(1, 20, 40), normal(2, 20)
    without = product(library, x, gemm(matrix))
    np.testing.assert_array_equal(product(library, x, gemm(matrix, bias)), without + bias)


def test_a_token_is_the_same_alone_and_among_others(library: Path, instructions: str) -> None:
    x, matrix = normal(0, 50, 1500), normal(1, 70, 1500)
    whole = product(library, x, gemm(matrix))
    np.testing.assert_array_equal(product(library, x[13:14], gemm(matrix)), whole[13:14])


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 150), st.integers(1, 150), st.integers(0, 1000))
def test_bf16_is_the_product_of_rounded_numbers(
    bf16_library: Path, tokens: int, columns: int, rows: int, seed: int
) -> None:
    """Products of two numbers of 8 bits are exact in float32, so that sums alone round."""
    x, matrix = normal(seed, tokens, columns), normal(seed + 1, rows, columns)
    found = product(bf16_library, x, gemm(matrix), bf16=True)
    check(found, *(one.astype("bfloat16").astype(np.float32) for one in (x, matrix)))


def test_bf16_of_more_columns_than_are_multiplied_at_once(bf16_library: Path) -> None:
    x, matrix = normal(0, 13, 5001), normal(1, 70, 5001)
    found = product(bf16_library, x, gemm(matrix), bf16=True, threads=2)
    check(found, *(one.astype("bfloat16").astype(np.float32) for one in (x, matrix)))


@pytest.mark.parametrize("bf16", [False, True])
def test_nan_stays_with_its_token(bf16_library: Path, bf16: bool) -> None:
    x, matrix = normal(0, 20, 64), normal(1, 64, 64)
    x[3, 5], x[4, 6] = np.nan, np.inf
    found = product(bf16_library, x, gemm(matrix), bf16=bf16)
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[4]).any()
    assert np.isfinite(np.delete(found, [3, 4], axis=0)).all()
