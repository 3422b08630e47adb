"""Checkpoints whose matrices are in fp8: the tensors that are read, and the refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvc_trt.errors import InputError
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.sources.fp8 import FP8, Fp8Source, as_floats
from kvc_trt.models.weights import check_weights
from tests.models.fp8_weights import COMPRESSED, StoredFp8, fp8_directory, fp8_source

UP = "model.layers.1.mlp.up_proj.weight"


class Changed(StoredFp8):
    """A checkpoint in which some tensors are replaced (None: absent)."""

    def __init__(self, config, tensors):
        super().__init__(config)
        self._tensors = tensors

    def names(self):
        kept = [name for name in super().names() if self._tensors.get(name, "") is not None]
        return [*kept, *(name for name, value in self._tensors.items() if value is not None and name not in kept)]

    def read(self, name):
        return self._tensors[name] if self._tensors.get(name) is not None else super().read(name)


@pytest.mark.parametrize("scale", ["tensor", "row", "column"])
def test_values_are_the_stored_numbers_times_their_scales(tiny_config, scale):
    config = tiny_config()
    stored = StoredFp8(config, scale=scale)
    source = as_floats(stored)
    check_weights(config, source)
    values = stored.read(UP).astype(np.float32) * stored.read(f"{UP}_scale").reshape(-1, 1)
    np.testing.assert_array_equal(source.read(UP), values)
    np.testing.assert_array_equal(source.read_rows(UP, 3, 7), values[3:7])
    assert source.dtype(UP) == "float32"
    exact = RandomWeights(config, 0).read(UP)
    assert np.abs(values - exact).max() <= np.abs(exact).max() / 16  # three bits of mantissa
    np.testing.assert_array_equal(source.read_fp8_rows(UP, 0, 96), stored.read(UP))


def test_tensors_not_in_fp8_stay_unchanged(tiny_config):
    source = fp8_source(tiny_config(), wide="layers.0|up_proj")
    assert UP not in source.matrices
    assert source.dtype(UP) == source.dtype("model.norm.weight") == "bfloat16"
    assert not [name for name in source.names() if "scale" in name]


def test_other_checkpoints_are_left_alone(tiny_config):
    plain = RandomWeights(tiny_config(), 0)
    assert as_floats(plain) is plain


def test_a_directory_is_read_from_its_files(tmp_path, tiny_config, tiny_fields):
    directory = fp8_directory(tmp_path / "fp8", tiny_config(), tiny_fields())
    checkpoint = Checkpoint(directory)
    assert checkpoint.dtype(UP) == FP8
    source = as_floats(checkpoint)
    check_weights(checkpoint.config, source)
    np.testing.assert_array_equal(source.read(UP), fp8_source(tiny_config()).read(UP))


BLOCKS = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{UP}_scale": None}, f"{UP} is {FP8}, but there is no {UP}_scale"),
        ({f"{UP}_scale": np.ones((3, 2), np.float32)}, r"has shape \[3, 2\], expected one scale per matrix or per row"),
        ({f"{UP}_scale": np.ones(96, np.int32)}, "is int32, expected one of float32"),
        ({f"{UP}_scale": None, f"{UP}_scale_inv": BLOCKS}, "parser does not take scales of two-dimensional blocks"),
        ({UP: np.zeros((96, 64), ml_dtypes.float8_e5m2)}, f"is float8_e5m2, expected {FP8}"),
        ({"model.norm.weight": np.zeros(64, ml_dtypes.float8_e4m3fn)}, "expected a matrix"),
    ],
)
def test_unreadable_fp8_tensors_are_refused_by_name(tiny_config, tensors, message):
    with pytest.raises(InputError, match=message) as caught:
        as_floats(Changed(tiny_config(), tensors))
    assert caught.value.exit_code == 2


def test_nan_weights_and_invalid_scales_are_refused_when_read(tiny_config):
    nan = np.full((96, 64), np.nan, ml_dtypes.float8_e4m3fn)
    with pytest.raises(InputError, match=r"up_proj\.weight: contains NaN"):
        Fp8Source(Changed(tiny_config(), {UP: nan})).read(UP)
    for wrong in (0.0, -1.0, np.inf, np.nan):
        scales = np.ones(96, np.float32)
        scales[5] = wrong
        with pytest.raises(InputError, match=r"up_proj\.weight_scale: expected positive numbers"):
            Fp8Source(Changed(tiny_config(), {f"{UP}_scale": scales})).row_scales(UP)


def test_extra_scales_are_passed_over_and_other_extra_tensors_are_not(tiny_config):
    extra = {"model.layers.0.self_attn.k_scale": np.ones((), np.float32), "model.odd": np.ones(2, np.float32)}
    source = as_floats(Changed(tiny_config(), extra))
    assert "model.layers.0.self_attn.k_scale" not in source.names()
    with pytest.raises(InputError, match=r"model\.odd not part of"):
        check_weights(tiny_config(), source)


@pytest.mark.parametrize(
    "settings",
    [COMPRESSED, {"quant_method": "fbgemm_fp8"}, {"quant_method": "fp8", "activation_scheme": "static"}],
)
def test_supported_fp8_configurations_are_read(tiny_config, settings):
    assert tiny_config(quantization_config=settings) == tiny_config()


def group(**weights):
    return COMPRESSED | {
        "config_groups": {"g": {"weights": COMPRESSED["config_groups"]["group_0"]["weights"] | weights}}
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"weight_block_size is \[128, 128\], expected one"),
        (group(strategy="block"), "strategy is 'block', expected one scale per matrix or per row"),
        (group(type="int4"), "type: .*'float', found 'int4'"),
        (group(num_bits=4), "num_bits: .*8, found 4"),
        ("fp8", "expected a mapping of names to values, found 'fp8'"),
    ],
)
def test_unsupported_fp8_configurations_are_refused(tiny_config, settings, message):
    with pytest.raises(InputError, match=message):
        tiny_config(quantization_config=settings)
