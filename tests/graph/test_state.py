from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.graph.state import state_tensors
from kvc_trt.operators.fp8_bounds import EMPTY
from kvc_trt.operators.shapes import LOWEST
from tests.graph.small_models import LLAMA, resolve


def test_skipped_layers_keep_everything_and_have_no_bounds():
    parameters = resolve("rocketkv", skip_layers=1)
    tensors = {tensor.name: tensor for tensor in state_tensors(LLAMA, parameters, "float32")}
    assert list(tensors)[:5] == ["k_cache.0", "v_cache.0", "k_cache.1", "v_cache.1", "bounds.1"]
    assert tensors["k_cache.0"].shape == (2, parameters.max_sequence_len, 16)
    assert tensors["k_cache.1"].shape == (2, parameters.capacity, 16)
    assert tensors["bounds.1"].shape == (2, 32, -(-parameters.capacity // parameters.page_size))
    assert tensors["bounds.1"].aliased_output == "bounds_out.1"
    assert tensors["v_cache.2"].bytes_per_row() == 2 * parameters.capacity * 16 * 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fills_are_the_lowest_finite_numbers(dtype):
    assert np.finfo(dtype).min == LOWEST[dtype]
    bounds = state_tensors(LLAMA, resolve("hybrid"), dtype)[2]
    assert (bounds.name, bounds.fill) == ("bounds.0", LOWEST[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fp8_bounds_are_bytes_in_rows_of_whole_vectors(dtype):
    plain = resolve("hybrid")
    bounds = state_tensors(LLAMA, replace(plain, fp8_bounds=True), dtype)[2]
    pages = -(-plain.capacity // plain.page_size)
    assert (bounds.name, bounds.dtype, bounds.fill) == ("bounds.0", "int8", EMPTY)
    assert bounds.shape == (2, 32, -(-pages // 16) * 16)
    assert bounds.bytes_per_row() == 2 * 32 * bounds.shape[2]


@given(st.integers(1, 300), st.integers(1, 20), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_bounds_of_16_bit_have_room_for_a_multiple_of_eight_pages(capacity, page_size, dtype):
    parameters = replace(resolve("hybrid"), capacity=capacity, page_size=page_size)
    bounds = state_tensors(LLAMA, parameters, dtype)[2]
    pages = -(-capacity // page_size)
    assert bounds.shape == (2, 32, pages if dtype == "float32" else -(-pages // 8) * 8)


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="float8"):
        state_tensors(LLAMA, resolve("full"), "float8")
