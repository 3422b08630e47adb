"""What verification needs from a backend: the engine run whole, its dense twin, its operators alone, and a look inside.

The rungs know nothing else of where an engine runs; each backend that executes has a `harness.py` that says how.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from kvc_trt.runtime.executor import Executor

Array = NDArray[Any]


class ObservedExecutor(Executor, Protocol):
    """An executor whose state, and whose values named at its making, can be read."""

    @property
    def buffers(self) -> Mapping[str, Array]:
        """The state by tensor name, [max_batch_size, ...]."""

    def exposed(self, name: str) -> Array:
        """An exposed value of the latest run."""


class EngineOperator(Protocol):
    """One kvc operator with the constants that `nodes` places of the engine share, runnable alone."""

    @property
    def name(self) -> str:
        """KvcPrefillAttention, KvcCompact, KvcHybridAttention, KvcDenseAttention, or that of a method of its own."""

    @property
    def nodes(self) -> int:
        """How often the engine has it."""

    @property
    def cache(self) -> int | None:
        """Number of a cache that it serves; None where all caches have the same constants."""

    def run(self, **inputs: Array) -> list[Array]:
        """Outputs in the order in which the operator declares them; the inputs stay as they are."""


@dataclass(frozen=True)
class Watched:
    """Names under which one operator of the running engine exposes what it got and gave."""

    cache: int
    """Row of `cache_lengths`."""
    inputs: tuple[str, ...]
    """q_window, k, v of a compaction; query of a step; nothing where a choice is not judged on its inputs."""
    outputs: tuple[str, ...]
    """indices of a compaction; output and selected of a step."""


class Harness(Protocol):
    """An engine on one backend."""

    def open(self, expose: Collection[str] = ()) -> ObservedExecutor:
        """The engine as it will be run, with `expose` readable."""

    def open_twin(self) -> Executor:
        """The dense twin: the same weights, nothing evicted, everything read."""

    def operators(self) -> list[EngineOperator]:
        """Every distinct operator."""

    def compactions(self) -> list[Watched]:
        """What chooses the tokens of a prompt that stay, one for every cache that does not keep them all."""

    def selections(self) -> list[Watched]:
        """What chooses the tokens that a step reads, one for every cache that is not read whole."""

    def describe(self) -> dict[str, str]:
        """What runs: `backend`, and for kernels of our own `kernels`."""
