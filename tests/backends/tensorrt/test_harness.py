"""The engines of verification for TensorRT, without a GPU: NVIDIA's parser and builder take every graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from kvc_trt.backends.onnxruntime.harness import OnnxRuntimeHarness
from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.single_operator import single_operators
from kvc_trt.backends.tensorrt.harness import TensorRtHarness, for_shapes
from kvc_trt.backends.tensorrt.lowering import PLUGINS, expected_aliases, lower
from kvc_trt.backends.tensorrt.running.in_memory import typed
from kvc_trt.cli.main import run
from kvc_trt.engine.program import engine_program, read_graph, twin_program
from kvc_trt.errors import InputError
from kvc_trt.graph.rewrites.expose import expose
from kvc_trt.operators.fp8_bounds import codes_of
from tests.backends.tensorrt.conftest import ask_parser, emulation

__all__ = ["ask_parser", "emulation"]

BATCH, PROMPT = 2, 128


@pytest.fixture
def engine(tiny_engine):
    return open_engine(tiny_engine)


@pytest.fixture(params=[False, True], ids=["own bounds", "bounds in fp8"])
def any_engine(request, tiny_arguments, tmp_path):
    fp8 = ("--set", "fp8_bounds=true") if request.param else ()
    assert run([*tiny_arguments, *fp8, "-o", str(tmp_path / "any")]) == 0
    return open_engine(tmp_path / "any")


def shapes_of(operator, engine):
    """Shapes of one operator's inputs at the engine's constants."""
    model, parameters = engine.model, engine.parameters
    heads, groups, size = model.num_attention_heads, model.num_key_value_heads, model.head_size
    cache = (BATCH, groups, parameters.capacity, size)
    return {
        "q": (BATCH, heads, PROMPT, size),
        "k": (BATCH, groups, PROMPT, size),
        "v": (BATCH, groups, PROMPT, size),
        "q_window": (BATCH, heads, parameters.window, size),
        "prompt_lengths": (BATCH,),
        "prompt_budgets": (BATCH,),
        "pool_kernels": (BATCH,),
        "query": (BATCH, heads, size),
        "k_new": (BATCH, groups, size),
        "v_new": (BATCH, groups, size),
        "k_cache": cache,
        "v_cache": cache,
        "bounds": (BATCH, groups, 2 * size, parameters.stored_pages(engine.model.dtype)),
        "cache_lengths": (BATCH,),
    }


def lowered(model):
    return lower(model, tensorrt=(11, 4), plugins=PLUGINS)


def test_every_operator_alone_is_built_as_the_plugin(any_engine, ask_parser):
    engine, dtype = any_engine, any_engine.model.dtype
    operators = [
        op for graph in (engine.prefill_graph, engine.decode_graph) for op in single_operators(read_graph(graph), dtype)
    ]
    assert [op.name for op in operators] == ["KvcPrefillAttention", "KvcCompact", "KvcHybridAttention"]
    graphs = [lowered(for_shapes(op.model, shapes_of(op, engine))) for op in operators]
    answers = ask_parser(*graphs, plan=True)
    for op, answer in zip(operators, answers, strict=True):
        assert (answer["errors"], answer.get("problem")) == ([], None), op.name
        assert answer["plan_bytes"] > 0, (op.name, answer["log"])
    assert [answer["plugins"] for answer in answers] == [{}, {"KvcCompact": 1}, {"KvcHybridAttention": 1}]
    assert answers[2]["aliases"] == {"result.1": "k_cache", "result.2": "v_cache", "result.3": "bounds"}


def test_for_shapes_does_not_change_the_operator(any_engine):
    """ONNX Runtime gives the same result for the graph with and without fixed shapes."""
    engine = any_engine
    op = next(
        op for op in single_operators(read_graph(engine.decode_graph), "float32") if op.name == "KvcHybridAttention"
    )
    shapes = shapes_of(op, engine)
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in op.inputs}
    inputs["cache_lengths"] = np.array([3, 40], np.int64)
    if engine.parameters.fp8_bounds:
        inputs["bounds"] = codes_of(inputs["bounds"])
    fixed = for_shapes(op.model, {name: value.shape for name, value in inputs.items()})
    assert [len(value.type.tensor_type.shape.dim) for value in op.model.graph.input] == [0] * 7
    import onnxruntime

    session = onnxruntime.InferenceSession(fixed.SerializeToString(), providers=["CPUExecutionProvider"])
    for expected, found in zip(op.run(**inputs), session.run(None, inputs), strict=True):
        assert np.array_equal(expected, found)


def test_graphs_with_their_inner_values_exposed_are_built(engine, ask_parser):
    watched = OnnxRuntimeHarness(engine, RunOptions(threads=1))
    wanted = [
        (engine.prefill_graph, watched.compactions()),
        (engine.decode_graph, watched.selections()),
    ]
    graphs, names = [], []
    for graph, operators in wanted:
        values = [name for op in operators for name in (*op.inputs, *op.outputs)]
        graphs.append(lowered(typed(expose(read_graph(graph), values), onnx.TensorProto.FLOAT)))
        names.append(values)
    for answer, values, graph in zip(_ask_beside(engine, graphs, ask_parser), names, graphs, strict=True):
        assert (answer["errors"], answer.get("problem")) == ([], None)
        assert set(values) <= set(answer["outputs"])
        assert answer["aliases"] == expected_aliases(graph)


def test_the_dense_twin_is_built(engine, ask_parser):
    program = twin_program(engine_program(engine))
    graphs = [lowered(program.prefill()), lowered(program.decode())]
    for answer in _ask_beside(engine, graphs, ask_parser):
        assert (answer["errors"], answer.get("problem")) == ([], None)


def test_an_engine_for_few_rows_is_refused_with_the_way_out(engine):
    build = engine.build.model_copy(update={"max_batch_size": 4})
    few = replace(engine, config=replace(engine.config, build=build))
    with pytest.raises(InputError, match="takes 4 rows at once; verification needs 8") as caught:
        TensorRtHarness(few, RunOptions())
    assert "--max-batch-size 8" in caught.value.hint


def _ask_beside(engine, graphs, ask_parser):
    """Parsed from files beside the weights that they refer to."""
    paths = []
    for index, graph in enumerate(graphs):
        path = engine.path / f"asked{index}.onnx"
        onnx.save(graph, path)
        paths.append(path)
    return ask_parser(*paths)
