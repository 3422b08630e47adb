from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.graph.state import state_tensors
from kvc_trt.operators.shapes import LOWEST
from tests.graph.small_models import LLAMA, resolve


def test_skipped_layers_keep_everything_and_have_no_bounds():
    parameters = resolve("rocketkv", skip_layers=1)
    tensors = {tensor.name: tensor for tensor in state_tensors(LLAMA, parameters, "float32")}
    assert list(tensors)[:5] == ["k_cache.0", "v_cache.0", "k_cache.1", "v_cache.1", "bounds.1"]
    assert tensors["k_cache.0"].shape == (2, parameters.max_sequence_len, 16)
    assert tensors["k_cache.1"].shape == (2, parameters.capacity, 16)
    assert tensors["bounds.1"].shape == (2, 32, parameters.num_pages())
    assert tensors["bounds.1"].aliased_output == "bounds_out.1"
    assert tensors["v_cache.2"].bytes_per_row() == 2 * parameters.capacity * 16 * 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fills_are_the_lowest_finite_numbers(dtype):
    assert np.finfo(dtype).min == LOWEST[dtype]
    bounds = state_tensors(LLAMA, resolve("hybrid"), dtype)[2]
    assert (bounds.name, bounds.fill) == ("bounds.0", LOWEST[dtype])


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="float8"):
        state_tensors(LLAMA, resolve("full"), "float8")
