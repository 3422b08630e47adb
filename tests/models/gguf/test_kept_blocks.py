"""A GGUF file's blocks in an engine's layout: the same values, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.errors import InputError
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.gguf.kept_blocks import KEPT_BITS, WITH_OFFSETS, kept_blocks
from kvc_trt.models.quantisation import BLOCK, dequantise
from tests.models.gguf.tiny import quantised, write


def values(blocks, bits):
    found = dequantise(blocks.packed, blocks.scales, bits)
    if blocks.offsets is not None:
        found.reshape(len(found), -1, BLOCK)[...] += blocks.offsets[..., None]
    return found


@pytest.mark.parametrize("kind", KEPT_BITS)
def test_blocks_have_the_values_that_they_had(kind, tmp_path):
    checkpoint = GgufCheckpoint(write(tmp_path / "model.gguf", kind=kind))
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ):
        whole = checkpoint.read(name)
        for start, stop in ((0, len(whole)), (3, 70)):
            blocks = checkpoint.read_blocks(name, start, stop)
            assert (blocks.offsets is not None) == (kind in WITH_OFFSETS)
            np.testing.assert_array_equal(values(blocks, KEPT_BITS[kind]), whole[start:stop])


@pytest.mark.parametrize("kind", KEPT_BITS)
def test_blocks_of_zeros_and_of_one_value_are_exact(kind):
    import gguf

    rows = np.zeros((3, 64), np.float32)
    rows[1] = 0.25
    rows[2, 5] = -3.5
    raw = quantised(rows, kind)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(values(kept_blocks(raw, kind, "here"), KEPT_BITS[kind]), expected)


def block(scale, minimum=None):
    halves = [scale] if minimum is None else [scale, minimum]
    raw = np.concatenate([np.array(halves, np.float16).view(np.uint8), np.arange(16, dtype=np.uint8) * 17])
    return raw[None]


BAD = [("Q4_0", block(np.inf)), ("Q4_1", block(1, np.nan)), ("Q4_1", block(np.nan, 1))]


@pytest.mark.parametrize(("kind", "raw"), BAD)
def test_nan_and_infinite_scales_are_refused(kind, raw):
    with pytest.raises(InputError, match="here: contains NaN or infinite weights"):
        kept_blocks(raw, kind, "here")


def test_blocks_that_float32_cannot_add_exactly_are_refused():
    """Eight times the scale and the minimum together take more than the 24 bits of a float32."""
    kept_blocks(block(0.1, 6e-8), "Q4_1", "here")
    for scale, minimum in ((30000, 6e-8), (1.788e-07, 33), (1e-6, 33)):
        with pytest.raises(InputError, match="too far apart to be added exactly in float32"):
            kept_blocks(block(scale, minimum), "Q4_1", "here")
