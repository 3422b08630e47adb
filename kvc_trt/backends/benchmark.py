"""The interface of profiling to a backend: open and time engines, measure their memory and its bandwidth.

Each backend that executes implements it in `benchmark.py`; on a CPU `host_memory` does most of the work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvc_trt.runtime.session.batch import batch_of

if TYPE_CHECKING:
    from kvc_trt.engine.program import Program

Array = NDArray[Any]
LARGEST_SHARE_OF_MEMORY = 0.5
"""The largest share of free memory that a measurement may take for its caches or buffers."""


@dataclass(frozen=True)
class CopyBandwidth:
    """The copy bandwidth of a memory in bytes per second, counting reads and writes."""

    median: float
    spread: float
    """The standard deviation of the rates."""
    samples: int
    buffer_bytes: int
    threads: int
    last_level_cache_bytes: int | None

    @classmethod
    def of(cls, rates: Sequence[float], buffer_bytes: int, threads: int, cache: int | None) -> CopyBandwidth:
        """Summarise the rates of several copies of one buffer."""
        return cls(statistics.median(rates), statistics.stdev(rates), len(rates), buffer_bytes, threads, cache)

    @property
    def beyond_cache(self) -> bool:
        """True if each buffer is at least as large as the last-level cache, so that the cache does not help."""
        return self.last_level_cache_bytes is None or self.buffer_bytes >= self.last_level_cache_bytes


@dataclass
class Peak:
    """The memory in use before a piece of work, and its peak during it, in bytes."""

    before: int
    highest: int = field(default=0)
    how: str = "resident memory above rest, sampled every 2 ms"
    """The method by which the figures were measured."""

    @property
    def above(self) -> int:
        """The bytes that the work took beyond those in use before."""
        return max(0, self.highest - self.before)


@dataclass(frozen=True)
class PartOfRun:
    """The time of a run and of one part of it, in seconds."""

    run: float
    part: float

    @property
    def share(self) -> float:
        """The part's share of the run."""
        return self.part / self.run if self.run else 0.0


@dataclass(frozen=True)
class OperatorTime:
    """The time of all nodes of one operator in a run."""

    name: str
    seconds: float
    calls: float
    """The number of nodes per run."""


class Benchmark(Protocol):
    """Measures engines on one kind of device. Its methods take the executors that it opened."""

    @property
    def weight_copies(self) -> int:
        """The number of copies of the weights in an engine."""

    def open(self, program: Program) -> Any:
        """Return an executor of the engine or of its twin."""

    def fill(self, executor: Any, rows: Mapping[str, Array]) -> None:
        """Fill every row of each state tensor with these contents."""

    def weight_format(self, program: Program) -> str:
        """Return the format in which a step reads the weights: that of the file, or a wider one after conversion."""

    def weight_bytes(self, executor: Any) -> tuple[int, str]:
        """Return the bytes of the executor's weights, and a description of their measurement."""

    def state_bytes(self, executor: Any) -> Mapping[str, int]:
        """Return the allocated bytes of each state tensor, all rows together, by its name."""

    def prefill_bytes(self, program: Program, rows: int, tokens: int) -> float:
        """Return the modelled bytes of a prefill of `rows` prompts of `tokens` tokens, without the weights."""

    def watch(self, executor: Any) -> AbstractContextManager[Peak]:
        """Measure the peak memory of a prefill inside the block."""

    def at_rest(self, executor: Any) -> Any:
        """Return an executor of the same program that holds its weights, and no caches or scratch of earlier steps."""

    def watch_steps(self, executor: Any) -> AbstractContextManager[Peak]:
        """Measure the peak memory of decode steps inside the block; `before` includes caches that exist already."""

    def free_bytes(self) -> int:
        """Return the bytes that are free for caches."""

    def copy_bandwidth(self) -> CopyBandwidth:
        """Measure the bandwidth of the memory that holds weights and caches."""

    def compaction(self, program: Program, prompts: NDArray[np.int64], repeats: int) -> PartOfRun | None:
        """Run `repeats` prefills of `prompts` [B, S] and return the one with the median share of compaction.

        None if nothing is compacted or the share cannot be measured.
        """

    def operators(self, program: Program, steps: Callable[[Any], object]) -> list[OperatorTime] | None:
        """Return the time of each operator in a decode step, slowest first; None if the backend cannot measure it.

        `steps` is called with an executor and runs decode steps on it; the first step is not counted.
        """

    def describe(self) -> dict[str, Any]:
        """Return this backend's entries in the record of the machine."""


def prefill_seconds(executor: Any, prompts: NDArray[np.int64]) -> float:
    """Time one prefill of `prompts` [B, S] (all S tokens real) in seconds; its result is dropped."""
    batch = batch_of(prompts.tolist(), executor.limits.prompt_block)
    started = time.perf_counter()
    executor.prefill(batch.input_ids, batch.prompt_lengths)
    return time.perf_counter() - started


def compacts(program: Program) -> bool:
    """Return whether a prefill of the program compacts anything."""
    return any(program.parameters.is_compressed(layer) for layer in range(program.model.num_hidden_layers))


def median_share(runs: Sequence[PartOfRun]) -> PartOfRun:
    """Return the run whose part has the median share."""
    return sorted(runs, key=lambda run: run.share)[len(runs) // 2]
