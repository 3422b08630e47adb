"""KvcNarrowLinear by the native library: Gemm's results for a few tokens, for any shape and processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.onnxruntime import native
from kvc_trt.graph.rewrites.native import prepare_draft
from kvc_trt.operators.native import NATIVE_NARROW_LINEAR
from tests.graph.small_models import normal
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import native_session
from tests.plugins_cpu.test_linear import check, gemm


def product(library: Path, x: np.ndarray, matrix: np.ndarray, bias: np.ndarray | None = None, threads: int = 1):
    loaded = native.load(library)
    prepared = prepare_draft(gemm(matrix, bias), loaded.operators)
    assert prepared.graph.node[0].op_type == NATIVE_NARROW_LINEAR
    (found,) = native_session(prepared, loaded, threads).run(None, {"x": x})
    return found


@pytest.mark.parametrize(("tokens", "columns", "rows"), [(1, 96, 64), (5, 33, 100), (9, 576, 130), (40, 7, 3)])
def test_native_products_equal_exact_ones(
    library: Path, instructions: str, tokens: int, columns: int, rows: int
) -> None:
    x, matrix = normal(0, tokens, columns), normal(1, rows, columns)
    check(product(library, x, matrix), x, matrix)


@settings(max_examples=60)
@given(
    st.integers(1, 20), st.integers(1, 150), st.integers(1, 150), st.sampled_from([1, 2]), st.integers(0, 1000),
    ANY_INSTRUCTIONS,
)  # fmt: skip
def test_random_shapes_equal_exact_products(
    library: Path, tokens: int, columns: int, rows: int, threads: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    x, matrix = normal(seed, tokens, columns), normal(seed + 1, rows, columns)
    check(product(library, x, matrix, threads=threads), x, matrix)


def test_a_bias_is_added(library: Path, instructions: str) -> None:
    x, matrix, bias = normal(0, 5, 40), normal(1, 20, 40), normal(2, 20)
    np.testing.assert_array_equal(product(library, x, matrix, bias), product(library, x, matrix) + bias)


def test_a_token_is_the_same_alone_and_among_others(library: Path, instructions: str) -> None:
    x, matrix = normal(0, 14, 150), normal(1, 70, 150)
    whole = product(library, x, matrix)
    for token in (0, 4, 5, 13):
        np.testing.assert_array_equal(product(library, x[token : token + 1], matrix), whole[token : token + 1])


def test_nan_stays_with_its_token(library: Path, instructions: str) -> None:
    x, matrix = normal(0, 7, 67), normal(1, 64, 67)
    x[3, 66], x[4, 6] = np.nan, np.inf
    found = product(library, x, matrix)
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[4]).any()
    assert np.isfinite(np.delete(found, [3, 4], axis=0)).all()
