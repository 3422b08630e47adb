"""What profiling needs from a backend: engines opened and timed, the memory they take, and how fast that memory is.

Each backend that executes has a `benchmark.py` that says how; on a processor `host_memory` does most of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvc_trt.runtime.batch import batch_of

if TYPE_CHECKING:
    from kvc_trt.engine.program import Program

Array = NDArray[Any]


@dataclass(frozen=True)
class CopyBandwidth:
    """How fast a memory is copied, bytes per second, read and written together."""

    median: float
    spread: float
    """Standard deviation of the rates."""
    samples: int
    buffer_bytes: int
    threads: int
    last_level_cache_bytes: int | None

    @classmethod
    def of(cls, rates: Sequence[float], buffer_bytes: int, threads: int, cache: int | None) -> CopyBandwidth:
        """From the rates of several copies of one buffer."""
        return cls(statistics.median(rates), statistics.stdev(rates), len(rates), buffer_bytes, threads, cache)

    @property
    def beyond_cache(self) -> bool:
        """Whether source and target together are at least twice the last-level cache, which then serves neither."""
        return self.last_level_cache_bytes is None or self.buffer_bytes >= self.last_level_cache_bytes


@dataclass
class Peak:
    """Memory in use around a piece of work, bytes."""

    before: int
    highest: int = field(default=0)
    how: str = "resident memory above rest, sampled every 2 ms"
    """What the figures are."""

    @property
    def above(self) -> int:
        """What the work needed beyond what was there before it."""
        return max(0, self.highest - self.before)


@dataclass(frozen=True)
class PartOfRun:
    """How long a run took, and one part of it, seconds."""

    run: float
    part: float

    @property
    def share(self) -> float:
        """The part's share of the run."""
        return self.part / self.run if self.run else 0.0


class Benchmark(Protocol):
    """One kind of place to measure. Executors that it opened are what its other methods take."""

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
        """How fast the memory is that holds weights and caches."""

    def compaction(self, program: Program, prompts: NDArray[np.int64], repeats: int) -> PartOfRun | None:
        """Of `repeats` prefills of `prompts` [B, S] the one with the median share of compaction.

        None where nothing is compacted, or nobody can tell.
        """

    def describe(self) -> dict[str, Any]:
        """What joins the record of the machine."""


def prefill_seconds(executor: Any, prompts: NDArray[np.int64]) -> float:
    """One prefill of `prompts` [B, S] (all S tokens real), timed; its result is dropped."""
    batch = batch_of(prompts.tolist(), executor.limits.prompt_block)
    started = time.perf_counter()
    executor.prefill(batch.input_ids, batch.prompt_lengths)
    return time.perf_counter() - started


def compacts(program: Program) -> bool:
    """Whether a prefill of the program compacts anything."""
    return any(program.parameters.is_compressed(layer) for layer in range(program.model.num_hidden_layers))


def median_share(runs: Sequence[PartOfRun]) -> PartOfRun:
    """The run whose part has the median share."""
    return sorted(runs, key=lambda run: run.share)[len(runs) // 2]
