from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.models import quantisation
from kvc_trt.models.quantisation import dequantise, quantise, quantised_chunks
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.weights import row_chunks


def matmul_nbits(activations, packed, scales, bits, block, accuracy_level):
    """One com.microsoft::MatMulNBits node on ONNX Runtime."""
    onnx = pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    rows, blocks = scales.shape
    node = helper.make_node(
        "MatMulNBits", ["a", "b", "s"], ["y"], domain="com.microsoft",
        K=blocks * block, N=rows, bits=bits, block_size=block, accuracy_level=accuracy_level,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, list(activations.shape))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [activations.shape[0], rows])],
        [numpy_helper.from_array(packed, "b"), numpy_helper.from_array(scales.astype(np.float32), "s")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"a": activations})[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("accuracy_level", [0, 1, 4])
def test_layout_is_that_of_matmul_nbits(bits, block, accuracy_level):
    rng = np.random.default_rng(bits * block)
    weight = rng.standard_normal((48, 4 * block), dtype=np.float32)
    activations = rng.standard_normal((3, 4 * block), dtype=np.float32)
    packed, scales = quantise(weight, bits, block)
    expected = activations.astype(np.float64) @ dequantise(packed, scales, bits).T.astype(np.float64)
    found = matmul_nbits(activations, packed, scales, bits, block, accuracy_level)
    # Level 4 also rounds the activations to 8 bits; the others are float32 arithmetic on the same weights.
    tolerance = 0.03 if accuracy_level == 4 else 2e-6
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("bits", [4, 8])
def test_every_weight_is_within_its_blocks_step(bits):
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal((64, 256)) * np.exp(rng.normal(size=(64, 1)) * 5)).astype(np.float32)
    packed, scales = quantise(weight, bits)
    assert packed.shape == (64, 8, 32 * bits // 8)
    assert packed.dtype == np.uint8
    assert scales.dtype == np.float16
    error = np.abs(dequantise(packed, scales, bits) - weight).reshape(64, 8, 32)
    step = np.abs(scales.astype(np.float32))[..., None]
    assert (error <= step * 1.001).all()  # a value opposite to the extreme one may be cut by a whole step
    inside = np.abs(weight.reshape(64, 8, 32)) < step * ((1 << (bits - 1)) - 1)
    assert (error[inside] <= (np.broadcast_to(step, error.shape)[inside] * 0.501)).all()


def test_values_on_the_grid_are_exact_and_the_range_is_used():
    levels = np.arange(-8, 8, dtype=np.float32)
    weight = np.concatenate([levels, levels])[None, :] * np.float32(0.25)
    packed, scales = quantise(weight, 4)
    np.testing.assert_array_equal(dequantise(packed, scales, 4), weight)
    assert scales.tolist() == [[0.25]]
    assert packed[0, 0, 0] == 0x10  # elements 0 and 1 are levels 0 and 1: low nibble first
    mirrored_packed, mirrored_scales = quantise(-weight, 4)
    np.testing.assert_array_equal(dequantise(mirrored_packed, mirrored_scales, 4), -weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_and_vanishing_blocks_become_zero(bits):
    weight = np.zeros((2, 64), np.float32)
    weight[1] = 1e-42
    packed, scales = quantise(weight, bits)
    assert (dequantise(packed, scales, bits) == 0).all()


@given(st.sampled_from([4, 8]), st.integers(1, 9), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_rows_are_quantised_independently(bits, rows, blocks, cut, seed):
    weight = np.random.default_rng(seed).standard_normal((rows, blocks * 32), dtype=np.float32)
    packed, scales = quantise(weight, bits)
    cut = min(cut, rows)
    parts = [quantise(part, bits) for part in (weight[:cut], weight[cut:]) if len(part)]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), packed)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), scales)


def test_a_tensor_is_quantised_as_if_read_whole(tiny_config, monkeypatch):
    monkeypatch.setattr(quantisation, "row_chunks", lambda shape, elements=500: row_chunks(shape, elements))
    source = RandomWeights(tiny_config(), 3)
    name = "model.layers.1.mlp.down_proj.weight"
    whole = quantise(source.read(name), 4)
    chunks = list(quantised_chunks(source, name, 4))
    assert len(chunks) > 1
    for ours, expected in zip(zip(*chunks, strict=True), whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(ours), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    weight = np.ones((4, 64), np.float32)
    weight[2, 40] = bad
    with pytest.raises(InputError, match="NaN or infinite"):
        quantise(weight, 4)


@pytest.mark.parametrize(
    ("shape", "bits", "block", "words"),
    [
        ((4, 48), 4, 32, "multiple of 32"),
        ((64,), 4, 32, "expected \\[out, in\\]"),
        ((4, 64), 3, 32, "4 or 8"),
        ((4, 64), 4, 24, "power of two"),
        ((0, 64), 4, 32, "cannot be quantised"),
    ],
)
def test_invalid_shapes_bits_and_blocks_are_refused(shape, bits, block, words):
    with pytest.raises(InputError, match=words):
        quantise(np.zeros(shape, np.float32), bits, block)


def test_dequantise_refuses_mismatched_arrays():
    packed, scales = quantise(np.ones((4, 64), np.float32), 4)
    with pytest.raises(ValueError, match="expected"):
        dequantise(packed, scales[:3], 4)


def test_a_tensor_that_is_not_finite_is_named(tiny_config, monkeypatch):
    source = RandomWeights(tiny_config(), 0)
    monkeypatch.setattr(source, "read_rows", lambda name, start, stop: np.full((stop - start, 64), np.nan, np.float32))
    with pytest.raises(InputError, match=r"^lm_head\.weight: contains NaN"):
        list(quantised_chunks(source, "lm_head.weight", 8))
