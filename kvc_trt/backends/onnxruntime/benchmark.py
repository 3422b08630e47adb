"""ONNX Runtime on this machine's processor as a place to measure.

What compaction takes is read from ONNX Runtime's own profile: a model-local function is inlined when a graph is loaded,
and what were its nodes carry the function's name in front. Loops and branches report their bodies as well as
themselves, so time is the union of intervals, never their sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.benchmark import Array, CopyBandwidth, PartOfRun, Peak, compacts, median_share, prefill_seconds
from kvc_trt.backends.host_memory import measure_copy_bandwidth, watch_memory
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.engine.program import Program
from kvc_trt.operators import PROMPT_BLOCK

COMPACTION = "KvcCompact"
_INLINED = "_inlfunc_"
_FLOAT32 = 4
Interval = tuple[float, float]


class OnnxRuntimeBenchmark:
    """ONNX Runtime on this machine's processor."""

    weight_copies = 1

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def open(self, program: Program) -> Any:
        """Graphs are loaded when they are first run."""
        return OnnxRuntimeExecutor(program, threads=self._threads)

    def fill(self, executor: Any, rows: Mapping[str, Array]) -> None:
        """Write into the buffers."""
        for name, row in rows.items():
            executor.buffers[name][:] = row

    def weight_format(self, program: Program) -> str:
        """The file's, which a run reads in place."""
        return program.weight_format

    def weight_bytes(self, executor: Any) -> tuple[int, str]:
        """The weight file, which is mapped."""
        return executor.program.weights_path.stat().st_size, "size of the file"

    def bounds_bytes(self, executor: Any) -> int:
        """The arrays that are neither keys nor values."""
        stored = ("k_cache", "v_cache")
        return sum(buffer.nbytes for name, buffer in executor.buffers.items() if not name.startswith(stored))

    def prefill_bytes(self, program: Program, rows: int, tokens: int) -> float:
        """By the blocks that the graph works in."""
        return prefill_memory(program, rows, tokens)

    def watch(self, executor: Any) -> AbstractContextManager[Peak]:
        """The process's resident memory, sampled."""
        return watch_memory()

    def free_bytes(self) -> int:
        """What the system has left."""
        import psutil

        return int(psutil.virtual_memory().available)

    def copy_bandwidth(self) -> CopyBandwidth:
        """The machine's memory, copied by as many threads as the engine uses."""
        return measure_copy_bandwidth(self._threads)

    def compaction(self, program: Program, prompts: NDArray[np.int64], repeats: int) -> PartOfRun | None:
        """From ONNX Runtime's own profile. Recording costs time, so only the share of the run is of use."""
        if not compacts(program):
            return None
        with TemporaryDirectory() as directory:
            executor = OnnxRuntimeExecutor(program, threads=self._threads, profile=Path(directory))
            prefill_seconds(executor, prompts[:, :1])  # starts threads and allocates, outside of the run that counts
            for _ in range(repeats):
                prefill_seconds(executor, prompts)
            return median_share(function_times(executor.end_profiling()["prefill"], COMPACTION)[1:])

    def describe(self) -> dict[str, Any]:
        """The number of threads."""
        return {"threads": self._threads}


def prefill_memory(program: Program, rows: int, tokens: int) -> float:
    """Bytes a prefill of the graph needs beyond the weights at its largest moment; `tokens`: the padded prompt length.

    The caches it gives out, the residual stream, and whichever is larger of attention (queries, keys and values in two
    layouts; one block's scores, masked scores and weights; its output in blocks and in order) and of the gated MLP.
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


def function_times(profile: Path, function: str) -> list[PartOfRun]:
    """For every run in an ONNX Runtime profile: its length, and the time inside calls of `function`."""
    events = json.loads(profile.read_text(encoding="utf-8"))
    prefix = _INLINED + function + "_"
    runs = [_interval(event) for event in events if event.get("name") == "model_run"]
    inside = [
        _interval(event) for event in events if event.get("cat") == "Node" and event.get("name", "").startswith(prefix)
    ]
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
