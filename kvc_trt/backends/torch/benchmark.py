"""Measure PyTorch around the kernels, on a GPU or, with a note in the result, on a CPU.

Engine and twin share their weights in memory: on a CPU always in float32, so that the floor counts the bytes that are
actually read. Steps and prefills are timed by the host's clock, since both end with a wait for the device; parts of a
prefill are timed by the device's events.

`break_even` measures the length for `--dense-until auto` on this backend.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.backends.benchmark import (
    Benchmark,
    CopyBandwidth,
    PartOfRun,
    Peak,
    compacts,
    median_share,
    prefill_seconds,
)
from kvc_trt.backends.break_even import attention_only, compared, remembered
from kvc_trt.backends.host_memory import measure_copy_bandwidth, watch_memory
from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.device import choose_device
from kvc_trt.backends.torch.executor import Decoding, TorchExecutor
from kvc_trt.backends.torch.model.decoder import TorchDecoder
from kvc_trt.backends.torch.model.weights import TorchWeights
from kvc_trt.backends.torch.policy_path import policy_path
from kvc_trt.engine.program import NO_FILE, Program
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import state_tensors
from kvc_trt.kernels.loading import current_library
from kvc_trt.machine import usable_cores
from kvc_trt.models.random_weights import RandomWeights

if TYPE_CHECKING:
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig


STATE_BYTES = 2 << 30
"""The bytes of all caches together: more than a GPU's L2 cache, and enough that a step takes much longer than its
overhead on the host."""


class TimedDecoder(TorchDecoder):
    """A decoder that appends the times before and after every compaction to `marks`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.marks: list[tuple[Any, Any]] = []

    def compaction_seconds(self) -> float:
        """Return the seconds of all compactions together; waits for a GPU."""
        if self.on_gpu:
            return sum(float(start.elapsed_time(end)) for start, end in self.marks) / 1e3
        return float(sum(end - start for start, end in self.marks))

    @override
    def _compact(self, *arguments: Any) -> Any:
        start = self._now()
        found = super()._compact(*arguments)
        self.marks.append((start, self._now()))
        return found

    @override
    def _store_by_nodes(self, *arguments: Any) -> Any:
        start = self._now()
        found = super()._store_by_nodes(*arguments)
        self.marks.append((start, self._now()))
        return found

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
COPIED_BYTES = 1 << 30
COPIES_PER_SAMPLE, SAMPLES = 8, 9
"""The number of copies per sample, and of samples. One copy takes half a millisecond; several hide a launch's cost."""


class TorchBenchmark(Benchmark):
    """Measures on the device of the kernel library in use, or on the CPU with reference operators."""

    weight_copies = 1

    def __init__(self, engine: EngineDirectory, options: RunOptions) -> None:
        self._engine, self._threads = engine, options.threads or usable_cores()
        self._options = replace(options, threads=self._threads)
        self._device = choose_device()

    @override
    def open(self, program: Program) -> TorchExecutor:
        """Return an executor that shares the weights in memory."""
        return TorchExecutor(program, self._options, weights=self._weights)

    @override
    def fill(self, executor: TorchExecutor, rows: Mapping[str, NDArray[Any]]) -> None:
        executor.fill_rows(rows)

    @override
    def weight_format(self, program: Program) -> str:
        """Return the format of the tensors in memory."""
        return FORMATS[self._weights.embedding.dtype]

    @override
    def weight_bytes(self, executor: TorchExecutor) -> tuple[int, str]:
        """Return the bytes of the tensors shared by engine and twin, and of this executor's rotary tables."""
        return self._weights.nbytes + executor.decoder.rotary_bytes, "resident tensors"

    @override
    def state_bytes(self, executor: TorchExecutor) -> Mapping[str, int]:
        return {name: tensor.nbytes for name, tensor in executor.state.items()}

    @override
    def prefill_bytes(self, program: Program, rows: int, tokens: int) -> float:
        """Return the bound that is checked before a prefill."""
        return memory.prefill_bound(program, rows, tokens, itemsize=self._weights.embedding.dtype.itemsize)

    @override
    def watch(self, executor: TorchExecutor) -> AbstractContextManager[Peak]:
        """Report PyTorch's count on a GPU, the process's resident memory on a CPU."""
        return self._watch_allocator() if self._on_gpu else watch_memory()

    @override
    def at_rest(self, executor: TorchExecutor) -> TorchExecutor:
        """Return the same executor after freeing its caches; its weights are shared with all others."""
        executor.allocate(0)
        return executor

    @override
    def watch_steps(self, executor: TorchExecutor) -> AbstractContextManager[Peak]:
        """Report PyTorch's count on a GPU, the process's resident memory on a CPU."""
        return self._watch_allocator() if self._on_gpu else watch_memory(mapped=False)

    @contextmanager
    def _watch_allocator(self) -> Iterator[Peak]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        peak = Peak(torch.cuda.memory_allocated(self._device), how="most that PyTorch had allocated, above rest")
        yield peak
        peak.highest = torch.cuda.max_memory_allocated(self._device)

    @override
    def free_bytes(self) -> int:
        return memory.free_bytes(self._device)

    @override
    def copy_bandwidth(self) -> CopyBandwidth:
        """Measure the device's memory; every byte counts twice, read and written."""
        return device_copy_bandwidth(self._device) if self._on_gpu else measure_copy_bandwidth(self._threads)

    @override
    def compaction(self, program: Program, prompts: NDArray[np.int64], repeats: int) -> PartOfRun | None:
        """Time `compact` in a `TimedDecoder`."""
        if not compacts(program):
            return None
        executor = TorchExecutor(program, weights=self._weights, decoding=Decoding(TimedDecoder))
        decoder, found = cast(TimedDecoder, executor.decoder), []
        for _ in range(repeats + 1):  # the first one warms up
            decoder.marks.clear()
            seconds = prefill_seconds(executor, prompts)
            found.append(PartOfRun(seconds, decoder.compaction_seconds()))
        return median_share(found[1:])

    @override
    def operators(self, program: Program, steps: Callable[[Any], object]) -> None:
        """Return None: a step is one CUDA graph, or eager code that reports no parts."""

    @override
    def describe(self) -> dict[str, Any]:
        """Return the device, the code that computes the operators, and on a CPU a note that no figure is from a GPU."""
        library = current_library()
        kernels = "reference operators" if library is None else f"{library.executor} library"
        found: dict[str, Any] = {"threads": self._threads, "torch_device": self._device.type, "kernels": kernels}
        if (path := policy_path(self._engine.model, self._engine.parameters)) is not None:
            found["without_kernels"] = str(path)
        if self._on_gpu:
            return found | {"gpu": torch.cuda.get_device_name(self._device)}
        return found | {"stands_in": f"the CPU, in float32 around the {kernels}"}

    @cached_property
    def _weights(self) -> TorchWeights:
        return TorchExecutor(self._engine, self._options).weights

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"


def device_copy_bandwidth(device: torch.device) -> CopyBandwidth:
    """Time copies of a gigabyte on a GPU by its events."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target, rates = torch.empty_like(source), []
    for sample in range(SAMPLES + 1):
        start, end = (_event() for _ in range(2))
        start.record()
        for _ in range(COPIES_PER_SAMPLE):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize(device)
        if sample:  # the first one touches the memory
            rates.append(2e3 * COPIES_PER_SAMPLE * COPIED_BYTES / start.elapsed_time(end))
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return CopyBandwidth.of(rates, COPIED_BYTES, 1, cache)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def break_even(model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
    """Return the length in tokens up to which attending densely is at least as fast; from the cache if known.

    UnsupportedEnvironment without a GPU and its kernels: reference operators on a CPU break even elsewhere.
    """
    device, library = choose_device(), current_library()
    if device.type != "cuda" or library is None:
        raise UnsupportedEnvironment(
            "--dense-until auto measures the kernels on a GPU for an engine that runs in PyTorch; found neither, and a "
            "CPU says nothing about them",
            hint="--dense-until TOKENS, or leave it out: the default is the token budget",
        )
    identity = {
        "model": dataclasses.asdict(model),
        "parameters": dataclasses.asdict(parameters),
        "dtype": dtype,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(device),
        "kernels": hashlib.sha256(library.path.read_bytes()).hexdigest(),
    }
    return remembered(identity, lambda: measure(model, parameters, dtype, device))


def measure(
    model: ModelConfig, parameters: PolicyParameters, dtype: str, device: torch.device, state_bytes: int = STATE_BYTES
) -> int:
    """Measure the break-even length on any device."""
    thin = attention_only(model, parameters, dtype, state_bytes)
    return compared(parameters, lambda _, form: _executor(thin, form, dtype, device))


def _executor(model: ModelConfig, parameters: PolicyParameters, dtype: str, device: torch.device) -> TorchExecutor:
    """Return an executor with random weights and caches; nothing is read from a file."""
    state = state_tensors(model, parameters, dtype)
    weights = TorchWeights.read(model, RandomWeights(model, 0), device, getattr(torch, dtype))
    program = Program(model, parameters, state, NO_FILE, NO_FILE, NO_FILE)
    executor = TorchExecutor(program, weights=weights, device=device.type)
    executor.allocate(1)
    for buffer in executor.state.values():
        if buffer.is_floating_point():
            buffer.normal_()
        else:
            buffer.random_(0, 120)  # no byte of a format, and of bounds in fp8, that stands for NaN
    return executor
