"""The interface of verification to a backend: an engine, its dense twin, its operators alone, and internal values.

Rungs use nothing else of a backend; each backend that executes implements the interface in `harness.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from kvc_trt.runtime.executor import Executor

Array = NDArray[Any]


class ObservedExecutor(Executor, Protocol):
    """An executor whose state and exposed values can be read."""

    @property
    def buffers(self) -> Mapping[str, Array]:
        """Return the state by tensor name, [max_batch_size, ...]."""

    def exposed(self, name: str) -> Array:
        """Return an exposed value of the latest run."""


class EngineOperator(Protocol):
    """One kvc operator with the constants that `nodes` nodes of the engine share, runnable alone."""

    @property
    def name(self) -> str:
        """The name of the operator, such as KvcCompact."""

    @property
    def nodes(self) -> int:
        """The number of the engine's nodes with this operator and constants."""

    @property
    def cache(self) -> int | None:
        """The number of a cache that it serves; None if all caches have the same constants."""

    def run(self, **inputs: Array) -> list[Array]:
        """Return the outputs in the operator's order; the inputs are not changed."""


@dataclass(frozen=True)
class Watched:
    """The names under which one operator of the running engine exposes its inputs and outputs."""

    cache: int
    """The row of `cache_lengths` of its cache."""
    inputs: tuple[str, ...]
    """q_window, k, v of a compaction; query of a step; empty if the choice is not judged by its inputs."""
    outputs: tuple[str, ...]
    """indices of a compaction; output and selected of a step."""


@dataclass(frozen=True)
class StoredBlock:
    """The names of the exact keys and values, [B,G,n,D] or for a step [B,G,D], that a graph stores in one cache."""

    cache: int
    keys: str
    values: str
    positions: str | None = None
    """The name of the list INT32 [B,G,n] of their positions; None if these are consecutive."""


class Harness(Protocol):
    """An engine on one backend, as verification uses it."""

    @property
    def truncates(self) -> bool:
        """Return whether tensor cores sum the products of scores, and cut the sums where float32 would round."""

    def open(self, expose: Collection[str] = ()) -> ObservedExecutor:
        """Open the engine as users run it, so that the values `expose` can be read."""

    def open_twin(self) -> Executor:
        """Open the dense twin: the same weights, nothing evicted, everything read."""

    def open_beside_twin(self) -> Executor | None:
        """Open the engine so that it agrees with the twin bit for bit; None if it does as users run it."""

    def operators(self) -> list[EngineOperator]:
        """Return every distinct operator of the engine."""

    def compactions(self) -> list[Watched]:
        """Return the operators that choose which prompt tokens are kept, one per cache that does not keep all."""

    def selections(self) -> list[Watched]:
        """Return the operators that choose which tokens a step reads, one per cache that is not read whole."""

    def draft_selections(self) -> list[list[Watched]]:
        """Return the operators of `selections` for each token of a draft pass; none if a pass does not show them."""

    def stored_blocks(self, graph: str) -> list[list[StoredBlock]]:
        """Return the blocks that the prefill, decode, extend or draft graph stores in caches, for each token of a pass.

        Empty if caches have no format, or if the executor does not expose them."""
        return []

    def routers(self, graph: str) -> Mapping[int, str]:
        """Return what the router of each layer with experts reads in that graph: [tokens,hidden], or with more axes.

        Empty if there are no experts, or if the executor does not expose it."""
        return {}

    def describe(self) -> dict[str, str]:
        """Describe the executor: `backend`, and `kernels` if our kernels run."""
