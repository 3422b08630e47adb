"""Measure TensorRT on a GPU. The dense twin of each context is built in memory, which takes minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.backends.benchmark import Benchmark, CopyBandwidth, PartOfRun, Peak
from kvc_trt.backends.onnxruntime.benchmark import prefill_memory
from kvc_trt.backends.tensorrt.device import DeviceBlock, Stream, call, free_memory, runtime
from kvc_trt.backends.tensorrt.running.executor import TensorRtExecutor
from kvc_trt.backends.tensorrt.running.in_memory import build_program
from kvc_trt.backends.tensorrt.running.loading import Toolkit as Toolkit
from kvc_trt.backends.tensorrt.running.loading import open_toolkit
from kvc_trt.engine.program import Program, engine_program

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

COPIED_BYTES = 1 << 30
COPIES_PER_SAMPLE, SAMPLES = 8, 9
"""The number of copies per sample, and of samples. One copy takes half a millisecond; several hide a launch's cost."""


class TensorRtBenchmark(Benchmark):
    """Measures on the GPU that the engine is for."""

    weight_copies = 3
    """Each plan has its own copy."""

    def __init__(self, engine: EngineDirectory) -> None:
        self._engine = engine

    @override
    def open(self, program: Program) -> TensorRtExecutor:
        """Open the engine's plans for its own program, or build plans for another one."""
        if program == engine_program(self._engine):
            return TensorRtExecutor(self._engine)
        loaded = build_program(self._tools, program, self._engine.build.max_batch_size)
        return TensorRtExecutor(program, loaded=loaded)

    @override
    def fill(self, executor: TensorRtExecutor, rows: Mapping[str, NDArray[Any]]) -> None:
        executor.fill_rows(rows)

    @override
    def weight_format(self, program: Program) -> str:
        """Return the file's format: TensorRT keeps the types of a graph."""
        return program.weight_format

    @override
    def weight_bytes(self, executor: TensorRtExecutor) -> tuple[int, str]:
        """Return the size of the plans, which hold little else."""
        return executor.load().plan_bytes, "size of all plans"

    @override
    def state_bytes(self, executor: TensorRtExecutor) -> Mapping[str, int]:
        return {tensor.name: executor.rows * tensor.bytes_per_row() for tensor in executor.program.state}

    @override
    def prefill_bytes(self, program: Program, rows: int, tokens: int) -> float:
        """Return the bytes of the graph in ONNX Runtime, only an order of magnitude here, where attention is fused."""
        return prefill_memory(program, rows, tokens)

    @contextmanager
    @override
    def watch(self, executor: TensorRtExecutor) -> Iterator[Peak]:
        """Report the memory set aside for a prefill, which allocates nothing while it runs."""
        yield Peak(0, executor.prefill_bytes(), "memory set aside for activations, and the state it returns")

    @override
    def at_rest(self, executor: TensorRtExecutor) -> TensorRtExecutor:
        """Return the same executor after freeing everything but its plans, which take minutes to build."""
        executor.release()
        return executor

    @contextmanager
    @override
    def watch_steps(self, executor: TensorRtExecutor) -> Iterator[Peak]:
        """Report the device's memory in use, which counts other processes too; steps allocate nothing."""
        peak = Peak(_used_memory(), how="the device's memory in use above rest, as its driver counts it")
        yield peak
        peak.highest = _used_memory()

    @override
    def free_bytes(self) -> int:
        return free_memory()[0]

    @override
    def copy_bandwidth(self) -> CopyBandwidth:
        """Time copies on the device; every byte counts twice, read and written."""
        stream, source, target = Stream(), DeviceBlock(COPIED_BYTES), DeviceBlock(COPIED_BYTES)
        rates = []
        try:
            for sample in range(SAMPLES + 1):
                started = time.perf_counter()
                for _ in range(COPIES_PER_SAMPLE):
                    stream.copy(target.address, source.address, COPIED_BYTES)
                stream.synchronise()
                if sample:  # the first one touches the memory
                    rates.append(2 * COPIES_PER_SAMPLE * COPIED_BYTES / (time.perf_counter() - started))
        finally:
            for part in (source, target, stream):
                part.free()
        (properties,) = call(runtime().cudaGetDeviceProperties, 0, doing="asking for the device's properties")
        return CopyBandwidth.of(rates, COPIED_BYTES, 1, int(properties.l2CacheSize))

    @override
    def compaction(self, program: Program, prompts: NDArray[np.int64], repeats: int) -> PartOfRun | None:
        """Return None: TensorRT reports layer times only outside normal runs. Compare prefills of engine and twin."""
        return None

    @override
    def operators(self, program: Program, steps: Callable[[Any], object]) -> None:
        """Return None: TensorRT reports layer times only outside normal runs."""

    @override
    def describe(self) -> dict[str, Any]:
        """Return the GPU and the plugin library."""
        tools = self._tools
        return {"gpu": tools.gpu, "tensorrt": tools.tensorrt.__version__, "plugins": tools.library.record()}

    @cached_property
    def _tools(self) -> Toolkit:
        return open_toolkit(self._engine)


def _used_memory() -> int:
    free, total = free_memory()
    return total - free
