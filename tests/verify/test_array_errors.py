"""Arrays are compared: a bfloat16 output by its value before rounding, other types as they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from kvc_trt.verify.rankings.array_errors import differences, maximum_error
from kvc_trt.verify.rankings.steps import attend_selected
from kvc_trt.verify.thresholds import thresholds_for

BF16 = ml_dtypes.bfloat16
BAR = thresholds_for("bf16").value_error
OUTPUTS = np.random.default_rng(0).standard_normal(4096).clip(-1.99, 1.99)


def truncated(values):
    """Rounded towards zero, as by dropping the lower half of a float32."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(BF16)


def test_a_correctly_rounded_output_is_right_although_its_rounding_exceeds_the_bar():
    assert np.abs(OUTPUTS.astype(BF16).astype(np.float64) - OUTPUTS).max() / 1.99 > BAR * 0.9
    assert maximum_error(OUTPUTS.astype(BF16), OUTPUTS) == 0.0
    assert np.abs(1.00390625 - np.float64(BF16(1.00390624))) > BAR, "half a spacing next to 1"


@pytest.mark.parametrize("error", [1e-4, 2.1e-3, 1e-2, -1e-2])
def test_an_error_before_the_rounding_is_seen_whole(error):
    """Nearly whole: of thousands of outputs some are beside a border between two roundings."""
    found = maximum_error((OUTPUTS + error).astype(BF16), OUTPUTS) * np.abs(OUTPUTS).max()
    assert 0.95 * abs(error) <= found <= abs(error)


def test_rounding_the_wrong_way_is_an_error():
    smaller = OUTPUTS / 1.5
    assert maximum_error(truncated(smaller), smaller) > BAR


def test_the_distance_is_to_the_nearest_number_that_rounds_to_the_output():
    found = np.array([1.0, 1.0, 1.0, -2.0, 0.0], BF16)
    expected = np.array([1.0 + 2**-8, 1.0 - 2**-9, 1.0 - 2**-8, -2.0 - 2**-7 - 1e-3, 1e-45])
    np.testing.assert_allclose(differences(found, expected), [0, 0, 2**-9, 1e-3, 0], atol=1e-15)


def test_non_finite_outputs_are_never_right():
    found = np.array([np.nan, np.inf, -np.inf, 1.0], BF16)
    assert not (differences(found, np.array([1.0, 1.0, 1.0, np.nan])) < np.inf).any()
    assert not maximum_error(found[:1], np.ones(1)) <= BAR


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_types_keep_their_plain_difference(dtype):
    found = OUTPUTS.astype(dtype)
    plain = np.abs(found.astype(np.float64) - OUTPUTS)
    assert (differences(found, OUTPUTS) == plain).all()
    assert maximum_error(found, OUTPUTS) == plain.max() / np.abs(OUTPUTS).max()


def test_attention_over_all_tokens_is_dense_attention():
    rng = np.random.default_rng(0)
    query = torch.from_numpy(rng.standard_normal((1, 4, 8)))
    keys, values = (torch.from_numpy(rng.standard_normal((1, 2, 5, 8))) for _ in range(2))
    everything = torch.arange(5).expand(1, 2, 5)
    found = attend_selected(query, keys, values, everything)
    weights = torch.softmax(query.reshape(1, 2, 2, 8) @ keys.transpose(2, 3) / 8**0.5, -1)
    torch.testing.assert_close(found, (weights @ values).reshape(1, 4, 8))
    padded = torch.tensor([[[0, 2, -1], [1, -1, -1]]])
    only = attend_selected(query, keys, values, padded)
    torch.testing.assert_close(only[0, 2:], values[0, 1, 1].expand(2, 8))
