"""Verify an engine as its ranks run it: their choices are collected by head and judged like those of one process."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from kvc_trt.backends.torch.harness import TorchHarness
from kvc_trt.backends.torch.node_harness import NodeHarness
from kvc_trt.backends.torch.parallel.executor import ParallelExecutor
from kvc_trt.backends.torch.parallel.group import RankGroup
from kvc_trt.engine.program import engine_program, twin_program

if TYPE_CHECKING:
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory


class ParallelHarness(TorchHarness):
    """The engine through `ParallelExecutor`; operators alone run in this process."""

    def __init__(self, engine: EngineDirectory, ranks: int, options: RunOptions) -> None:
        super().__init__(engine, options)
        self._ranks = ranks

    @override
    def open(self, expose: Collection[str] = ()) -> ParallelExecutor:
        return ParallelExecutor(engine_program(self._engine), self._group, expose=expose)

    @override
    def open_twin(self) -> ParallelExecutor:
        """Open the dense twin so that its steps run the same operations as the engine's."""
        return ParallelExecutor(twin_program(self._engine), self._group, twin_of=self._engine.parameters)

    @override
    def describe(self) -> dict[str, str]:
        """Return the description of the harness of one process, and the number of ranks."""
        found = super().describe()
        return {**found, "backend": f"{found['backend']}, {self._ranks} ranks"}

    @cached_property
    def _group(self) -> RankGroup:
        """The ranks, shared by all executors."""
        return RankGroup(self._engine.model, self._engine.weight_file, self._ranks, threads=self._options.threads)


class ParallelNodeHarness(ParallelHarness, NodeHarness):
    """An engine whose ranks run its caches by nodes, for example if layers slide."""
