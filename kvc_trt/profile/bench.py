"""Where engines are measured: all that differs between ONNX Runtime, TensorRT and PyTorch, a CPU and a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.profile.copy_bandwidth import CopyBandwidth, measure_copy_bandwidth
from kvc_trt.profile.memory import Peak, prefill_memory, watch_memory, weight_format

if TYPE_CHECKING:
    from kvc_trt.engine import Engine
    from kvc_trt.engine.program import Program
    from kvc_trt.profile.attribution import FunctionTime
    from kvc_trt.profile.subject import Subject

Array = NDArray[Any]

ELSEWHERE = {
    "tensorrt-llm": "kvc-trt build --backend tensorrt compiles the same graphs; TensorRT's trtexec times plans alone",
}
"""What measures engines of other backends."""


class Bench(Protocol):
    """One kind of place. Executors that it opened are what its other methods take."""

    @property
    def weight_copies(self) -> int:
        """How often an engine holds its weights."""

    def open(self, program: Program) -> Any:
        """An executor of the engine, or of a twin of it."""

    def fill(self, executor: Any, rows: Mapping[str, Array]) -> None:
        """Give every row of each state tensor these contents."""

    def weight_format(self, program: Program) -> str:
        """The format in which a step reads the weights: that of the file, or a wider one that they were brought to."""

    def weight_bytes(self, executor: Any) -> tuple[int, str]:
        """Bytes of the executor's weights, and what that figure is."""

    def bounds_bytes(self, executor: Any) -> int:
        """Bytes of the page bounds, or what else a policy stores beside keys and values, in the executor's state."""

    def prefill_bytes(self, program: Program, rows: int, tokens: int) -> float:
        """What a prefill of `rows` prompts of `tokens` tokens should need beyond the weights, by a model of it."""

    def watch(self, executor: Any) -> AbstractContextManager[Peak]:
        """What a prefill inside of the block needs for a while."""

    def free_bytes(self) -> int:
        """Memory that caches may still take."""

    def copy_bandwidth(self) -> CopyBandwidth:
        """Of the memory that weights and caches lie in."""

    def compaction(self, subject: Subject, rows: int, context: int, repeats: int) -> FunctionTime | None:
        """The share of compaction in a prefill; None where nothing is compacted, or nobody can tell."""

    def describe(self) -> dict[str, Any]:
        """What joins the record of the machine."""


class HostBench:
    """ONNX Runtime on this machine's processor."""

    weight_copies = 1

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def open(self, program: Program) -> Any:
        """Graphs are loaded when they are first run."""
        from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

        return OnnxRuntimeExecutor(program, threads=self._threads)

    def fill(self, executor: Any, rows: Mapping[str, Array]) -> None:
        """In place."""
        for name, row in rows.items():
            executor.buffers[name][:] = row

    def weight_format(self, program: Program) -> str:
        """Of the file, which a run reads in place."""
        return weight_format(program.weights_path)

    def weight_bytes(self, executor: Any) -> tuple[int, str]:
        """Of the file that they are mapped from."""
        return executor.program.weights_path.stat().st_size, "size of the file"

    def bounds_bytes(self, executor: Any) -> int:
        """Of the arrays that are neither keys nor values."""
        stored = ("k_cache", "v_cache")
        return sum(buffer.nbytes for name, buffer in executor.buffers.items() if not name.startswith(stored))

    def prefill_bytes(self, program: Program, rows: int, tokens: int) -> float:
        """Of the graph's blocks."""
        return prefill_memory(program, rows, tokens)

    def watch(self, executor: Any) -> AbstractContextManager[Peak]:
        """The process's resident memory, sampled."""
        return watch_memory()

    def free_bytes(self) -> int:
        """Of the machine."""
        import psutil

        return int(psutil.virtual_memory().available)

    def copy_bandwidth(self) -> CopyBandwidth:
        """By as many threads as the engine uses."""
        return measure_copy_bandwidth(self._threads)

    def compaction(self, subject: Subject, rows: int, context: int, repeats: int) -> FunctionTime | None:
        """From ONNX Runtime's own profile of a run."""
        from kvc_trt.profile.compaction import time_compaction

        return time_compaction(subject, rows, context, repeats)

    def describe(self) -> dict[str, Any]:
        """Threads."""
        return {"threads": self._threads}


def bench_for(engine: Engine, threads: int) -> Bench:
    """Where an engine of its backend is measured; UnsupportedEnvironment for a backend that profile cannot run."""
    if engine.backend == "onnxruntime":
        return HostBench(threads)
    if engine.backend == "tensorrt":
        from kvc_trt.profile.bench_tensorrt import TensorRtBench

        return TensorRtBench(engine)
    if engine.backend == "torch":
        from kvc_trt.profile.bench_torch import TorchBench

        return TorchBench(engine, threads)
    raise UnsupportedEnvironment(
        f"{engine.path} was built for {engine.backend}; profile runs engines for onnxruntime, tensorrt and torch",
        hint=ELSEWHERE.get(engine.backend),
    )
