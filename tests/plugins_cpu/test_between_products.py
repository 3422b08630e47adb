"""Steps between a layer's products: native operators compute the same as the nodes that they replace."""

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
from kvc_trt.graph.rewrites.fused import ADD_NORM, FUSED, GATED_HALVES, GATED_UNIT, ROTATED_HEADS
from kvc_trt.graph.rewrites.native import prepare
from kvc_trt.operators import KVC_DOMAIN, OPSET
from kvc_trt.operators.emitter import Emitter
from tests.graph.small_models import normal, open_session
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import native_session


def model(emit: Emitter, x: np.ndarray, outputs: list[str], **constants: np.ndarray) -> onnx.ModelProto:
    """Return a graph of the emitted nodes behind products with constant matrices, which make it a part of a layer."""
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", x.shape[1]])]
    made = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(emit.nodes, "part", values, results, made)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(KVC_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)


def compare(library: Path, part: onnx.ModelProto, x: np.ndarray, expected: str | None, tolerance: float = 2e-6) -> None:
    """Both ways of computing a part agree, and the native one is there where it is expected."""
    loaded = native.load(library)
    prepared = prepare(part, loaded.operators)
    assert [node.op_type for node in prepared.graph.node if node.op_type in FUSED] == ([expected] if expected else [])
    found = native_session(prepared, loaded, 2).run(None, {"x": x})
    for one, other in zip(found, open_session(part).run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def product(emit: Emitter, name: str) -> str:
    return str(emit.Gemm("x", name, transB=1))


def gated(x: np.ndarray, size: int, seed: int, *, joined: bool) -> onnx.ModelProto:
    emit = Emitter()
    if joined:
        gate, up = emit.Split(product(emit, "both"), axis=-1, num_outputs=2, outputs=["gate", "up"])
        constants = {"both": normal(seed, 2 * size, x.shape[1])}
    else:
        gate, up = product(emit, "gates"), product(emit, "ups")
        constants = {"gates": normal(seed, size, x.shape[1]), "ups": normal(seed + 1, size, x.shape[1])}
    emit.Mul(emit.Mul(gate, emit.Sigmoid(gate)), up, outputs=["y"])
    return model(emit, x, ["y"], **constants)


def check_gated(library: Path, x: np.ndarray, size: int, seed: int, *, joined: bool) -> None:
    """Against float64: ONNX Runtime's own sigmoid is off by more than rounding."""
    part, loaded = gated(x, size, seed, joined=joined), native.load(library)
    prepared = prepare(part, loaded.operators)
    assert [node.op_type for node in prepared.graph.node][-1] == (GATED_HALVES if joined else GATED_UNIT)
    (found,) = native_session(prepared, loaded, 2).run(None, {"x": x})
    gate, up = part.graph.node[-2].input[0], part.graph.node[-1].input[1]
    part.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (gate, up))
    _, gates, ups = (one.astype(np.float64) for one in open_session(part).run(None, {"x": x}))
    np.testing.assert_allclose(found, gates / (1 + np.exp(-gates)) * ups, rtol=1e-6, atol=1e-30)


@pytest.mark.pairwise
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("size", [16, 37, 400])
def test_native_gated_units_equal_their_nodes(library: Path, instructions: str, joined: bool, size: int) -> None:
    check_gated(library, normal(0, 70, 24), size, 1, joined=joined)


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 70), st.booleans(), st.integers(0, 1000), ANY_INSTRUCTIONS)
def test_random_native_gated_units_equal_their_nodes(
    library: Path, tokens: int, size: int, joined: bool, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    check_gated(library, normal(seed, tokens, 8), size, seed, joined=joined)


def test_gates_may_be_large_or_nan(library: Path, instructions: str) -> None:
    x = np.array([[1e30, -1e30], [120, -120], [0, -0.0], [np.nan, 1], [1, np.nan]], np.float32)
    emit = Emitter()
    gate, up = product(emit, "one"), product(emit, "two")
    emit.Mul(emit.Mul(gate, emit.Sigmoid(gate)), up, outputs=["y"])
    part = model(emit, x, ["y"], one=np.array([[1, 0]], np.float32), two=np.array([[0, 1]], np.float32))
    compare(library, part, x, GATED_UNIT)


def normed(x: np.ndarray, seed: int, *outputs: str) -> onnx.ModelProto:
    emit = Emitter()
    size = x.shape[1]
    emit.Add("x", product(emit, "matrix"), outputs=["sum"])
    emit.RMSNormalization("sum", "weight", axis=-1, epsilon=1e-5, outputs=["y"])
    return model(emit, x, list(outputs), matrix=normal(seed, size, size), weight=normal(seed + 1, size))


@pytest.mark.parametrize("size", [16, 33, 250])
def test_native_sums_and_norms_equal_their_nodes(library: Path, instructions: str, size: int) -> None:
    x = normal(0, 90, size)
    compare(library, normed(x, 1, "sum", "y"), x, ADD_NORM, 2e-5)


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(0, 1000), ANY_INSTRUCTIONS)
def test_random_native_sums_and_norms_equal_their_nodes(
    library: Path, tokens: int, size: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    x = normal(seed, tokens, size)
    compare(library, normed(x, seed, "y"), x, ADD_NORM, 2e-5)


def rotated(x: np.ndarray, heads: int, kv_heads: int, size: int, *outputs: str, **rotary: int) -> onnx.ModelProto:
    """Return the rotation in the form of a decode graph."""
    emit = Emitter()
    both, width = heads + kv_heads, (heads + 2 * kv_heads) * size
    cos, sin = (emit.Gather(name, np.arange(len(x)).reshape(-1, 1)) for name in ("cosines", "sines"))
    row = emit.Reshape(product(emit, "matrix"), [0, 1, width])
    first, last = emit.Split(row, [both * size, kv_heads * size], axis=2, outputs=["first", "last"])
    wide = emit.Cast(first, to=TensorProto.FLOAT)
    turned = emit.Cast(emit.RotaryEmbedding(wide, cos, sin, num_heads=both, **rotary), to=TensorProto.FLOAT)
    emit.Split(emit.Reshape(turned, [0, both, size]), [heads, kv_heads], axis=1, outputs=["q", "k"])
    emit.Reshape(last, [0, kv_heads, size], outputs=["v"])
    angles = normal(5, len(x), size // 2)
    matrix = normal(6, width, x.shape[1])
    return model(emit, x, list(outputs), matrix=matrix, cosines=np.cos(angles), sines=np.sin(angles))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 1, 20), (2, 2, 6)])
def test_native_rotated_heads_equal_their_nodes(
    library: Path, instructions: str, heads: int, kv_heads: int, size: int
) -> None:
    x = normal(0, 5, 12)
    compare(library, rotated(x, heads, kv_heads, size, "q", "k", "v"), x, ROTATED_HEADS, 5e-6)


def test_a_value_that_is_an_output_is_not_fused(library: Path) -> None:
    """A value that is exposed for verification is computed by its own node."""
    x = normal(0, 5, 12)
    compare(library, rotated(x, 4, 2, 8, "q", "k", "v", "first"), x, None, 5e-6)


def test_interleaved_rotations_are_not_fused(library: Path) -> None:
    x = normal(0, 5, 12)
    compare(library, rotated(x, 4, 2, 8, "q", "k", "v", interleaved=1), x, None, 5e-6)


def test_halves_with_another_reader_are_not_fused(library: Path) -> None:
    x = normal(0, 5, 12)
    part = gated(x, 8, 0, joined=True)
    part.graph.output.append(helper.make_tensor_value_info("gate", TensorProto.FLOAT, None))
    compare(library, part, x, None, 5e-6)
