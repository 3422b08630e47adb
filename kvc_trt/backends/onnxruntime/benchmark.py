"""Measure ONNX Runtime on this machine's CPU.

The time of compaction is read from ONNX Runtime's profile: loading a graph inlines model-local functions, and prefixes
the names of their nodes with the function's name. Loops and branches report their bodies as well as themselves, so time
is the union of intervals, never their sum.

`break_even` measures the length for `--dense-until auto` on this backend.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.backends.benchmark import (
    Array,
    Benchmark,
    CopyBandwidth,
    OperatorTime,
    PartOfRun,
    Peak,
    compacts,
    median_share,
    prefill_seconds,
)
from kvc_trt.backends.break_even import attention_only, compared, remembered
from kvc_trt.backends.host_memory import measure_copy_bandwidth, watch_memory
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.native import native_operators
from kvc_trt.backends.onnxruntime.operator_times import is_node, operator_of, operator_times, read_events
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.engine.program import Program
from kvc_trt.files.cache import scratch_directory
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.build import build_decode
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.machine import usable_cores
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.registry import prompt_runs
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.operators import PROMPT_BLOCK

_FLOAT32 = 4
STATE_BYTES = 256 << 20
"""The bytes of all caches together, too many for a CPU's cache."""
Interval = tuple[float, float]


class OnnxRuntimeBenchmark(Benchmark):
    """ONNX Runtime on this machine's processor."""

    weight_copies = 1

    def __init__(self, options: RunOptions, dtype: str) -> None:
        """Measure engines whose activations have this type."""
        self._threads = options.threads or usable_cores()
        self._options = replace(options, threads=self._threads)
        self._dtype = dtype

    @override
    def open(self, program: Program) -> Any:
        """Return an executor; graphs are loaded when they are first run."""
        return OnnxRuntimeExecutor(program, self._options)

    @override
    def fill(self, executor: Any, rows: Mapping[str, Array]) -> None:
        for name, row in rows.items():
            executor.buffers[name][:] = row

    @override
    def weight_format(self, program: Program) -> str:
        """Return the format of the file, which a run reads in place."""
        return program.weight_format

    @override
    def weight_bytes(self, executor: Any) -> tuple[int, str]:
        """Return the size of the weight file, which is mapped."""
        return executor.program.weight_file.size, "size of the file"

    @override
    def state_bytes(self, executor: Any) -> Mapping[str, int]:
        return {name: buffer.nbytes for name, buffer in executor.buffers.items()}

    @override
    def prefill_bytes(self, program: Program, rows: int, tokens: int) -> float:
        """Return the modelled bytes, by the blocks that the graph works in."""
        return prefill_memory(program, rows, tokens)

    @override
    def watch(self, executor: Any) -> AbstractContextManager[Peak]:
        return watch_memory()

    @override
    def at_rest(self, executor: Any) -> Any:
        """Open the program again: a session keeps the memory of its largest step."""
        opened = self.open(executor.program)
        assert opened.decode_session is not None
        return opened

    @override
    def watch_steps(self, executor: Any) -> AbstractContextManager[Peak]:
        return watch_memory(mapped=False)

    @override
    def free_bytes(self) -> int:
        import psutil

        return int(psutil.virtual_memory().available)

    @override
    def copy_bandwidth(self) -> CopyBandwidth:
        """Measure this machine's memory with as many threads as the engine uses."""
        return measure_copy_bandwidth(self._threads)

    @override
    def compaction(self, program: Program, prompts: NDArray[np.int64], repeats: int) -> PartOfRun | None:
        """Read compaction's time from ONNX Runtime's profile; recording takes time, so only the share is meaningful."""
        if not compacts(program):
            return None
        with scratch_directory("profile") as directory:
            executor = OnnxRuntimeExecutor(program, self._options, profile=directory)
            prefill_seconds(executor, prompts[:, :1])  # starts threads and allocates, outside of the run that counts
            for _ in range(repeats):
                prefill_seconds(executor, prompts)
            return median_share(function_times(executor.end_profiling()["prefill"], *prompt_runs())[1:])

    @override
    def operators(self, program: Program, steps: Callable[[Any], object]) -> list[OperatorTime]:
        """Read operators' times from ONNX Runtime's profile; recording takes time, so only shares are meaningful."""
        with scratch_directory("profile") as directory:
            executor = OnnxRuntimeExecutor(program, self._options, profile=directory)
            steps(executor)
            return operator_times(executor.end_profiling()["decode"])

    @override
    def describe(self) -> dict[str, Any]:
        """Return the number of threads, the code that computes the operators, and the arithmetic of prefill."""
        native = native_operators(self._dtype)
        operators = "bodies" if native is None else native.describe()
        return {"threads": self._threads, "operators": operators, "prefill_precision": self._options.prefill_precision}


def prefill_memory(program: Program, rows: int, tokens: int) -> float:
    """Return the peak bytes of a prefill without the weights; `tokens` is the padded prompt length.

    It counts the caches it returns, the residual stream, and the larger of attention (queries, keys and values in two
    layouts; one block's scores, masked scores and weights; the output in blocks and in order) and the gated MLP.
    """
    model = program.model
    positions = rows * tokens
    queries = positions * model.num_attention_heads * model.head_size
    keys = positions * model.num_key_value_heads * model.head_size
    scores = rows * model.num_attention_heads * PROMPT_BLOCK * tokens
    attention = 4 * queries + 4 * keys + 3 * scores
    feed_forward = 3 * positions * model.intermediate_size
    workspace = _FLOAT32 * (2 * positions * model.hidden_size + max(attention, feed_forward))
    return rows * sum(tensor.bytes_per_row() for tensor in program.state) + workspace


def function_times(profile: Path, *functions: str) -> list[PartOfRun]:
    """Return, for every run in an ONNX Runtime profile, its duration and the time inside calls of `functions`.

    A call is a native operator's node, or the nodes that its body was inlined to.
    """
    events = read_events(profile)
    runs = [_interval(event) for event in events if event.get("name") == "model_run"]
    inside = [_interval(event) for event in events if is_node(event) and operator_of(event) in functions]
    return [
        PartOfRun(
            run=(stop - start) * 1e-6,
            part=_union(interval for interval in inside if start <= interval[0] < stop) * 1e-6,
        )
        for start, stop in sorted(runs)
    ]


def _interval(event: dict[str, float]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> float:
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def break_even(model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
    """Return the length in tokens up to which attending densely is at least as fast; from the cache if known."""
    import onnxruntime

    native = native_operators(dtype)
    identity = {
        "model": dataclasses.asdict(model),
        "parameters": dataclasses.asdict(parameters),
        "dtype": dtype,
        "onnxruntime": onnxruntime.__version__,
        "native": None if native is None else [native.digest, native.instructions],
        "cores": os.cpu_count(),
    }
    return remembered(identity, lambda: _measure(model, parameters, dtype))


def _measure(model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
    thin = attention_only(model, parameters, dtype, STATE_BYTES)
    shared: dict[str, Any] = {}

    def open_form(name: str, form: PolicyParameters) -> OnnxRuntimeExecutor:
        executor = _executor(root / name, thin, form, dtype)
        executor.buffers.update(shared)  # one set of caches serves both forms
        shared.update(executor.buffers)
        return executor

    with scratch_directory("break-even") as root:
        return compared(parameters, open_form)


def _executor(directory: Path, model: ModelConfig, parameters: PolicyParameters, dtype: str) -> OnnxRuntimeExecutor:
    directory.mkdir()
    weights = directory / WEIGHTS_FILE
    kind = "fp16" if dtype == "float16" else "fp32"
    write_weights(model, RandomWeights(model, 0), weights, weights=kind, length=parameters.max_sequence_len)
    graph = build_decode(model, parameters, weights=GraphWeights(weights))
    state = state_tensors(model, parameters, dtype)
    executor = OnnxRuntimeExecutor(
        Program(model, parameters, state, HeldFile(weights), prefill=lambda: graph, decode=lambda: graph)
    )
    executor.allocate(1)
    generator = np.random.default_rng(0)
    for buffer in executor.buffers.values():
        buffer.reshape(-1)[:] = np.resize(generator.standard_normal(1 << 20).astype(buffer.dtype), buffer.size)
    return executor
