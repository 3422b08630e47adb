"""Prefill by OpenVINO writes the same state as ONNX Runtime's, and decoding goes on from it."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from onnx import TensorProto, helper

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.openvino.backend import BACKEND
from kvc_trt.backends.openvino.executor import OpenVinoExecutor
from kvc_trt.backends.openvino.lowering import GraphConstants, Target
from kvc_trt.backends.openvino.paged_attention import AttentionHeads
from kvc_trt.backends.openvino.prefill import CompiledGraph
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import read_graph
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.graph.rewrites.expose import index_lists
from kvc_trt.models.quantisation import BLOCK, dequantise
from kvc_trt.operators import CONTRIB_DOMAIN
from kvc_trt.operators.tensors import FP8_BOUNDS
from tests.rounding import assert_close

LENGTHS = (200, 1, 31)


def padded(lengths, seed=0):
    random = np.random.default_rng(seed)
    ids = np.zeros((len(lengths), -(-max(lengths) // 128) * 128), np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = random.integers(2, 97, length)
    return ids, np.array(lengths, np.int64)


def both(program):
    """Return the executors of both backends, with their index lists of prefill exposed, and the lists' names."""
    names = index_lists(read_graph(program.prefill))
    executors = [kind(program, RunOptions(threads=1), expose=names) for kind in (OnnxRuntimeExecutor, OpenVinoExecutor)]
    for executor in executors:
        executor.allocate(4)
    return (*executors, names)


def assert_same(expected, found, tolerance=1e-5):
    assert np.array_equal(found.cache_lengths, expected.cache_lengths)
    assert_close(found.logits, expected.logits, tolerance)
    assert found.state.keys() == expected.state.keys()
    for name, array in expected.state.items():
        assert found.state[name].dtype == array.dtype
        assert_close(found.state[name], array, tolerance, name)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "policy",
    [
        "full", "rocketkv, a skipped layer", "snapkv", "rocketkv, bounds in fp8", "quest", "quest, bounds in fp8",
        "h2o", "duo-attention", "expected-attention", "rocketkv, budgets from the prompt",
        "h2o, budgets from the prompt", "tova, budgets from the prompt", "streaming-llm, budgets from the prompt",
    ],
)  # fmt: skip
def test_rows_of_unequal_length_keep_the_same_tokens(make_program, policy):
    expected, executor, names = both(make_program(policy))
    ids, lengths = padded(LENGTHS)
    assert_same(expected.prefill(ids, lengths), executor.prefill(ids, lengths))
    for name in names:
        assert np.array_equal(executor.exposed(name), expected.exposed(name)), name


def test_graphs_of_earlier_versions_do_not_say_whether_bounds_are_fp8(make_program):
    program = make_program("rocketkv")
    graph = read_graph(program.prefill)
    for node in graph.graph.node:
        kept = [one for one in node.attribute if one.name != FP8_BOUNDS.name]
        del node.attribute[:]
        node.attribute.extend(kept)
    for body in graph.functions:
        body.attribute[:] = [name for name in body.attribute if name != FP8_BOUNDS.name]
    earlier = dataclasses.replace(program, prefill=lambda: graph)
    ids, lengths = padded(LENGTHS)
    expected, found = (OpenVinoExecutor(one, RunOptions(threads=1)).prefill(ids, lengths) for one in (program, earlier))
    assert np.array_equal(found.logits, expected.logits)


def test_the_lowest_index_wins_where_scores_are_equal(make_program):
    expected, executor, names = both(make_program("rocketkv", pool_kernel=63))
    ids, lengths = np.full((1, 256), 5, np.int64), np.array([256], np.int64)
    expected.prefill(ids, lengths)
    executor.prefill(ids, lengths)
    assert names
    for name in names:
        assert np.array_equal(executor.exposed(name), expected.exposed(name)), name


def test_prompts_of_other_lengths_and_batches_follow_one_another(make_program):
    expected, executor, _ = both(make_program("rocketkv"))
    for lengths in [(256,), (3,), LENGTHS, (256,), (100, 256), (3,)]:
        ids, lengths = padded(lengths, seed=len(lengths))
        assert_same(expected.prefill(ids, lengths), executor.prefill(ids, lengths))


def test_padding_never_reaches_a_real_token(make_program):
    executor = OpenVinoExecutor(make_program("rocketkv"), RunOptions(threads=1))
    ids, lengths = padded(LENGTHS)
    other = ids.copy()
    for row, length in enumerate(lengths):
        other[row, length:] = 96
    found, again = executor.prefill(ids, lengths), executor.prefill(other, lengths)
    assert np.array_equal(found.logits, again.logits)
    for name, array in found.state.items():
        assert np.array_equal(array, again.state[name]), name


@pytest.mark.parametrize("fp8_bounds", [False, True])
def test_decoding_goes_on_in_place(make_program, fp8_bounds):
    expected, executor, _ = both(make_program("rocketkv", fp8_bounds=fp8_bounds))
    ids, lengths = padded(LENGTHS)
    steps = []
    for each in (expected, executor):
        prefilled = each.prefill(ids, lengths)
        for row in range(len(lengths)):
            each.insert(prefilled, row, row)
        tokens = prefilled.logits.argmax(axis=1)
        steps.append(each.decode(tokens, lengths.copy(), prefilled.cache_lengths.copy()).copy())
    assert_close(steps[1], steps[0])


@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 2e-2), ("int4", 2e-2), ("fp16", 2e-3)])
def test_quantised_and_half_precision_weights_stay_near_the_reference(make_program, precision, tolerance):
    """`full` keeps everything, so inputs rounded to 8 bits change the result only a little."""
    expected, executor, _ = both(make_program("full", precision))
    ids, lengths = padded(LENGTHS)
    found = executor.prefill(ids, lengths)
    largest = max(float(np.abs(array).max()) for array in found.state.values())
    assert_same(expected.prefill(ids, lengths), found, tolerance * max(1.0, largest))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_products_of_older_engines_are_near_dequantised_ones(bits):
    """Graphs of older engines call MatMulNBits, whose scales are float32 and flat."""
    rows, columns, random = 48, 64, np.random.default_rng(0)
    packed = random.integers(0, 256, (rows, columns // BLOCK, BLOCK * bits // 8), np.uint8)
    scales = random.random(rows * columns // BLOCK, np.float32)
    given = [("x", TensorProto.FLOAT), ("packed", TensorProto.UINT8), ("scales", TensorProto.FLOAT)]
    node = helper.make_node(
        "MatMulNBits", [name for name, _ in given], ["y"], domain=CONTRIB_DOMAIN,
        N=rows, K=columns, bits=bits, block_size=BLOCK,
    )  # fmt: skip
    inputs = [helper.make_tensor_value_info(*one, [3, columns] if one[0] == "x" else None) for one in given]
    graph = helper.make_graph([node], "old", inputs, [helper.make_empty_tensor_value_info("y")])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(CONTRIB_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=11)
    compiled = CompiledGraph(
        model, GraphConstants({"packed": packed, "scales": scales}), Target(AttentionHeads(4, 2, 16), "float32")
    )
    x = random.standard_normal((3, columns), np.float32)
    expected = x @ dequantise(packed, scales.reshape(rows, -1), bits).T
    assert np.abs(compiled.run({"x": x}, {}, ["y"])["y"] - expected).max() < 2e-2 * np.abs(expected).max()


def test_heads_that_fused_attention_does_not_take_run_the_body(make_program, monkeypatch):
    assert AttentionHeads(4, 2, 64).supported
    assert not AttentionHeads(4, 2, 40).supported
    monkeypatch.setattr(AttentionHeads, "supported", property(lambda heads: False))
    expected, executor, _ = both(make_program("rocketkv"))
    ids, lengths = padded(LENGTHS)
    assert_same(expected.prefill(ids, lengths), executor.prefill(ids, lengths))


def test_bfloat16_prefill_stays_near_float32(make_program):
    program = make_program("full")
    ids, lengths = padded(LENGTHS)
    exact = OpenVinoExecutor(program, RunOptions(threads=1)).prefill(ids, lengths)
    rounded = OpenVinoExecutor(program, RunOptions(threads=1, prefill_precision="bf16")).prefill(ids, lengths)
    assert np.abs(rounded.logits - exact.logits).max() < 0.16 * np.abs(exact.logits).max()


def test_a_prefill_that_is_not_kept_is_compiled_again(make_program):
    program = make_program("rocketkv")
    kept, dropped = (
        OpenVinoExecutor(program, RunOptions(threads=1)),
        OpenVinoExecutor(program, RunOptions(threads=1), keep_prefill=False),
    )
    dropped.load()
    for lengths in [(200,), LENGTHS]:
        prompts = padded(lengths)
        assert_same(kept.prefill(*prompts), dropped.prefill(*prompts))
        assert "compiled_prefill" in vars(kept)
        assert "compiled_prefill" not in vars(dropped)


def test_an_unknown_precision_is_refused():
    with pytest.raises(InputError, match="prefill precision 'f64' on openvino; expected f32 or bf16"):
        BACKEND.check_options(RunOptions(prefill_precision="f64"))


def test_the_weight_file_is_not_changed(make_program):
    program = make_program("full")
    before = hashlib.sha256(program.weight_file.path.read_bytes()).hexdigest()
    OpenVinoExecutor(program, RunOptions(threads=1)).prefill(*padded(LENGTHS))
    assert hashlib.sha256(program.weight_file.path.read_bytes()).hexdigest() == before


def test_a_graph_that_openvino_refuses_is_reported_in_one_line(make_program):
    program = make_program("full")
    graph = read_graph(program.prefill)
    graph.graph.node[-1].op_type = "NoSuchOperator"
    damaged = OpenVinoExecutor(dataclasses.replace(program, prefill=lambda: graph))
    with pytest.raises(
        UnsupportedEnvironment, match=r"openvino [\d.]+ cannot load the prefill graph: .*NoSuch"
    ) as found:
        damaged.load()
    assert "\n" not in str(found.value)
