"""Decode speed on ONNX Runtime's CPU: RocketKV against our own dense engine, interleaved in one run.

    python -m benchmarks.decode.onnxruntime_steps                       # everything: about fifteen minutes
    python -m benchmarks.decode.onnxruntime_steps --contexts 16384 --batches 1 --parts step
    python -m benchmarks.decode.onnxruntime_steps --parts attention   # one layer's attention beside a bare matmul
    python -m benchmarks.decode.onnxruntime_steps --weights int4 --contexts 4096 16384    # quantised weights

Where the library of native operators is found (docs/native.md), each side is measured by it and by the bodies.

Caches are filled synthetically; one step is one whole run of the decode graph. Every pair (dense, sparse) alternates,
so a busy machine slows both. The figures are medians; the spread is the interquartile range over the median.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
from onnx import ModelProto, TensorProto, helper

from benchmarks import store
from kvc_trt import policies
from kvc_trt.backends.onnxruntime.native import NativeOperators, native_operators
from kvc_trt.graph import IR_VERSION
from kvc_trt.graph.build import build_decode
from kvc_trt.graph.rewrites.native import prepare
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.operators import KVC_DOMAIN, OPSET
from kvc_trt.operators.attention import attend
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.shapes import HeadShape, Layout

TOKEN_BUDGET = 512
NEW_TOKENS = 128
NATIVE = "_native"
"""The suffix of the name of a side that the native operators compute."""
ROOM = 64
"""Free slots of every cache while it is measured."""
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", dtype="float32", vocab_size=32000, hidden_size=1024, intermediate_size=2816,
    num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_size=64, norm_epsilon=1e-5,
    rotary_base=500000.0, rotary_scaling=None, max_position_embeddings=131072, tie_word_embeddings=False,
    qkv_bias=False, output_bias=False, qk_norm=False, sliding_window=None, bos_token_id=None, eos_token_ids=(),
)  # fmt: skip
ATTENTION_SHAPE = replace(MODEL, num_attention_heads=32, num_key_value_heads=8, head_size=128)
Step = Callable[[], None]


def resolve(policy: str, context: int, model: ModelConfig = MODEL) -> PolicyParameters:
    return policies.resolve(
        policy, model=model, token_budget=TOKEN_BUDGET, max_input_len=context - NEW_TOKENS, max_output_len=NEW_TOKENS
    )


def open_session(
    path: Path, threads: int, prepack: bool, native: NativeOperators | None = None
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Both sessions of a comparison live in one process: a pool that spins while idle takes a core from the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if native is not None:
        native.register(options)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def synthetic(shape: tuple[int, ...]) -> np.ndarray:
    """Normal values, a pattern of a million of them repeated: drawing gigabytes would take minutes."""
    pattern = np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32)
    return np.resize(pattern, shape)


def bound_step(
    session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray], aliases: dict[str, str], shared: set[str]
) -> Step:
    """Return a run with every input bound once; `aliases` maps an input to the output that shares its buffer.

    Inputs named in `shared` use one buffer for all layers, where the caches of all would not fit in memory. One
    layer's cache is far larger than the processor's caches, so this does not make it faster.
    """
    binding = session.io_binding()
    values: dict[str, Any] = {}
    for name, array in feeds.items():
        kind = name.split(".")[0]
        key = kind if kind in shared else name
        if key not in values:
            values[key] = (array, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_input(name, values[key][1])
        if name in aliases:
            binding.bind_ortvalue_output(aliases[name], values[key][1])
    for output in session.get_outputs():
        if output.name not in aliases.values():
            binding.bind_output(output.name)
    keep = (values, binding)
    return lambda: session.run_with_iobinding(keep[1])


def interleave(steps: dict[str, Step], seconds: float, burst: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each step: median, minimum, spread. Steps alternate in bursts of `burst` runs after one untimed
    run, which brings back what the other step evicted from the processor's caches."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(next(iter(samples.values()))) < 7:
        for name, step in steps.items():
            step()
            for _ in range(burst):
                started = time.perf_counter()
                step()
                samples[name].append((time.perf_counter() - started) * 1e3)
    return {name: _summary(values) for name, values in samples.items()}


def _summary(values: list[float]) -> dict[str, float]:
    first, _, third = quantiles(values, n=4)
    middle = median(values)
    return {
        "median_ms": middle,
        "min_ms": min(values),
        "spread": (third - first) / middle,
        "runs": len(values),
    }


def whole_step(
    context: int, batch: int, threads: int, seconds: float, prepack: bool, directory: Path, names: tuple[str, ...]
) -> dict[str, Any]:
    steps, shared_any = {}, False
    for name in names:
        native = native_operators() if name.endswith(NATIVE) else None
        parameters = resolve(name.removesuffix(NATIVE), context)
        weights = GraphWeights(directory / "weights.safetensors")
        path = directory / f"{name}.{context}.onnx"
        graph = build_decode(MODEL, parameters, weights=weights)
        onnx.save(prepare(graph, () if native is None else native.operators), path)
        tensors = state_tensors(MODEL, parameters, "float32")
        total = batch * sum(tensor.bytes_per_row() for tensor in tensors)
        shared = {"k_cache", "v_cache"} if total > psutil.virtual_memory().available // 2 else set()
        shared_any |= bool(shared)
        feeds: dict[str, np.ndarray] = {}
        by_kind: dict[str, np.ndarray] = {}
        for tensor in tensors:
            kind = tensor.name.split(".")[0]
            if kind in shared:
                if kind not in by_kind:
                    by_kind[kind] = synthetic((batch, *tensor.shape))
                feeds[tensor.name] = by_kind[kind]
            else:
                feeds[tensor.name] = synthetic((batch, *tensor.shape))
        lengths = [parameters.layer_capacity(layer) - ROOM for layer in range(MODEL.num_hidden_layers)]
        feeds["token"] = np.arange(batch, dtype=np.int64)
        feeds["positions"] = np.full(batch, context - ROOM, np.int64)
        feeds["cache_lengths"] = np.repeat(np.array(lengths, np.int64)[:, None], batch, axis=1)
        aliases = {tensor.name: tensor.aliased_output for tensor in tensors}
        steps[name] = bound_step(open_session(path, threads, prepack, native), feeds, aliases, shared)
    figures = interleave(steps, seconds, burst=2)
    return {
        "context": context, "batch": batch, "threads": threads, "prepacking": prepack,
        "one_cache_buffer_for_all_layers": shared_any, **figures,
    }  # fmt: skip


def _call(emit: Emitter, operator: Operator, **attributes: int) -> list[str]:
    """A node whose values have the names of the operator; returns those of its outputs."""
    inputs, outputs = ({tensor.name: tensor.name for tensor in part} for part in (operator.inputs, operator.outputs))
    return list(operator.call(emit, inputs, outputs, **attributes))


def attention_graphs(context: int) -> tuple[dict[str, ModelProto], dict[str, PolicyParameters]]:
    """One node of each kind at 32/8/128, and the bare products that dense attention cannot do without."""
    shape = ATTENTION_SHAPE
    sparse, dense = (resolve(name, context, shape) for name in ("rocketkv", "full"))
    heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_size
    new = {"query": [1, heads, size], "k_new": [1, kv_heads, size], "v_new": [1, kv_heads, size]}

    def caches(capacity: int) -> dict[str, list[int]]:
        return {"k_cache": [1, kv_heads, capacity, size], "v_cache": [1, kv_heads, capacity, size]}

    head_shape = HeadShape(heads, kv_heads, size)
    layout = Layout(head_shape, sparse.capacity, sparse.num_pages(), "float32")
    bounds = {"bounds": [1, kv_heads, 2 * size, sparse.num_pages()]}
    emit = Emitter()
    hybrid_outputs = _call(
        emit, HYBRID_ATTENTION, page_size=sparse.page_size, top_r=sparse.top_r, top_k=sparse.top_k,
        token_budget=sparse.token_budget, dense_until=sparse.dense_until, fp8_bounds=int(sparse.fp8_bounds),
        recent=sparse.recent,
    )  # fmt: skip
    hybrid_inputs = {**new, **caches(sparse.capacity), **bounds}
    body = HYBRID_ATTENTION.body(layout)
    graphs = {"rocketkv": _one_node(emit, hybrid_inputs, hybrid_outputs[:-1], body)}
    emit = Emitter()
    outputs = _call(emit, DENSE_ATTENTION, dense_until=0)
    inputs = {**new, **caches(dense.capacity)}
    graphs["full"] = _one_node(emit, inputs, outputs, DENSE_ATTENTION.body(layout))
    emit = Emitter()
    grouped = attend.group_query(emit, "query", layout)
    scores = emit.MatMul(grouped.scaled, emit.Transpose("k_cache", perm=[0, 1, 3, 2]))
    emit.MatMul(emit.Softmax(scores, axis=-1), "v_cache", outputs=["output"])
    graphs["bare_matmul"] = _one_node(emit, {"query": new["query"], **caches(dense.capacity)}, ["output"])
    return graphs, {"rocketkv": sparse, "full": dense, "bare_matmul": dense}


def _one_node(emit: Emitter, inputs: dict[str, list[int]], outputs: list[str], *bodies: Any) -> ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    if "k_new" in inputs:
        values.append(helper.make_tensor_value_info("cache_lengths", TensorProto.INT64, [1]))
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(KVC_DOMAIN, 1)]
    graph = helper.make_graph(emit.nodes, "attention", values, results)
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, functions=list(bodies))


def attention_alone(context: int, threads: int, seconds: float, directory: Path) -> dict[str, Any]:
    graphs, parameters = attention_graphs(context)
    steps, library = {}, native_operators()
    if library is not None:
        for name in ("full", "rocketkv"):
            graphs[f"{name}{NATIVE}"], parameters[f"{name}{NATIVE}"] = graphs[name], parameters[name]
    for name, model in graphs.items():
        native = library if name.endswith(NATIVE) else None
        path = directory / f"attention.{name}.onnx"
        onnx.save(prepare(model, () if native is None else native.operators), path)
        session = open_session(path, threads, prepack=True, native=native)
        feeds = {value.name: synthetic(tuple(value.shape)) for value in session.get_inputs()}
        if "cache_lengths" in feeds:
            feeds["cache_lengths"] = np.array([parameters[name].capacity - ROOM], np.int64)
        outputs = {output.name for output in session.get_outputs()}
        aliases = {value: f"{value}_out" for value in feeds if f"{value}_out" in outputs}
        steps[name] = bound_step(session, feeds, aliases, set())
    return {"context": context, "heads": "32/8/128", "threads": threads, **interleave(steps, seconds, burst=10)}


def report(rows: list[dict[str, Any]], title: str, columns: tuple[str, ...]) -> None:
    print(f"\n{title}")
    for row in rows:
        head = "  ".join(f"{name} {row[name]:>6}" for name in columns)
        figures = "  ".join(
            f"{name} {row[name]['median_ms']:8.3f} ms (min {row[name]['min_ms']:.3f}, +-{row[name]['spread']:.0%})"
            for name in ("full", "rocketkv", f"full{NATIVE}", f"rocketkv{NATIVE}", "bare_matmul")
            if name in row
        )
        native = f", of native operators {row['ratio_native']:.2f}" if "ratio_native" in row else ""
        ratios = f"ratio {row['ratio']:.2f} (of minima {row['ratio_of_minima']:.2f}{native})"
        print(f"{head}  {figures}  {ratios}", flush=True)


def add_ratios(row: dict[str, Any]) -> dict[str, Any]:
    row["ratio"] = row["full"]["median_ms"] / row["rocketkv"]["median_ms"]
    row["ratio_of_minima"] = row["full"]["min_ms"] / row["rocketkv"]["min_ms"]
    if f"full{NATIVE}" in row:
        row["ratio_native"] = row[f"full{NATIVE}"]["median_ms"] / row[f"rocketkv{NATIVE}"]["median_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15, help="measuring time per pair")
    parser.add_argument("--weights", choices=["fp32", "int8", "int4"], default="fp32", help="of the whole step")
    parser.add_argument("--parts", nargs="+", choices=["step", "attention"], default=["step", "attention"])
    parser.add_argument("--no-prepack", action="store_true", help="leave the weights mapped from the file")
    parser.add_argument("--write", action="store_true", help="store the figures in benchmarks/results/")
    arguments = parser.parse_args()
    native = native_operators()
    sides = ("full", "rocketkv", *((f"full{NATIVE}", f"rocketkv{NATIVE}") if native else ()))
    result: dict[str, Any] = {
        "token_budget": TOKEN_BUDGET,
        "model": f"8 layers, hidden 1024, 16/4 heads of 64, {arguments.weights}",
        "native": None if native is None else native.instructions,
    }
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if "step" in arguments.parts:
            source = RandomWeights(MODEL, 0)
            path = directory / "weights.safetensors"
            write_weights(MODEL, source, path, weights=arguments.weights, length=max(arguments.contexts))
            rows = []
            for batch in arguments.batches:
                for context in arguments.contexts:
                    row = whole_step(
                        context, batch, arguments.threads, arguments.seconds, not arguments.no_prepack, directory,
                        sides,
                    )  # fmt: skip
                    rows.append(add_ratios(row))
                    report(rows[-1:], "whole step", ("batch", "context", "threads"))
            result["whole_step"] = rows
        if "attention" in arguments.parts:
            rows = [add_ratios(attention_alone(16384, threads, arguments.seconds, directory)) for threads in (1, 2)]
            report(rows, "attention alone, one layer of 32/8/128", ("context", "threads"))
            result["attention_alone"] = rows
    if arguments.write:
        kind = "" if arguments.weights == "fp32" else f"_{arguments.weights}"
        print(store.write_result(f"decode_onnxruntime{kind}", result))


if __name__ == "__main__":
    main()
