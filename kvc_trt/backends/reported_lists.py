"""Open an executor that reports the tokens that its caches keep and read: its graphs' index lists become outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvc_trt.contexts.packing import fingerprint_of
from kvc_trt.errors import InputError
from kvc_trt.graph.state import cache_sites
from kvc_trt.proof import MadeBy

if TYPE_CHECKING:
    from kvc_trt.backends.base import Backend
    from kvc_trt.backends.harness import Array, ObservedExecutor, Watched
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory


class ExposedLists:
    """The `ReportedLists` of an executor that was opened with its index lists exposed."""

    def __init__(
        self,
        executor: ObservedExecutor,
        made_by: MadeBy,
        compactions: Sequence[Watched],
        selections: Sequence[Watched],
    ) -> None:
        self._executor = executor
        self.made_by = made_by
        self._compactions = {op.cache: op.outputs[-1] for op in compactions}
        self._selections = {op.cache: op.outputs[-1] for op in selections}

    def kept(self, row: int) -> dict[int, Array]:
        """Return per cache the prompt positions [heads, width] that one row of the latest prefill has kept."""
        return {cache: self._executor.exposed(name)[row] for cache, name in self._compactions.items()}

    def read(self, row: int) -> dict[int, Array]:
        """Return per cache the slots [heads, width] that one row of the latest step has read."""
        return {cache: self._executor.exposed(name)[row] for cache, name in self._selections.items()}


def open_with_lists(
    engine: EngineDirectory, backend: Backend, options: RunOptions
) -> tuple[ObservedExecutor, ExposedLists]:
    """Return an executor and its lists; nothing is loaded yet.

    InputError, with the reason, for a policy whose lists do not cover all tokens that are kept and read.
    """
    harness = backend.harness(engine, options)
    compactions, selections = harness.compactions(), harness.selections()
    check_covered(engine, {op.cache for op in compactions}, {op.cache for op in selections}, "the engine's graphs")
    executor = harness.open(expose=sorted({op.outputs[-1] for op in (*compactions, *selections)}))
    return executor, ExposedLists(executor, made_by(engine, options), compactions, selections)


def check_covered(engine: EngineDirectory, kept: set[int], read: set[int], what: str) -> None:
    """Raise InputError unless lists of these caches cover all choices of the engine's policy."""
    policy = engine.parameters.policy
    rules = {site.cache: site.parameters for site in cache_sites(engine.model, engine.parameters)}
    chooses = {cache: rule for cache, rule in rules.items() if rule.compresses}
    if not any(rule.chooses for rule in chooses.values()):
        raise InputError(f"KV proof: {policy} compresses nothing in this engine, so there is nothing to prove")
    for cache, rule in chooses.items():
        if rule.evicts_while_decoding:
            what_drops = "a sliding layer" if rule.slides else policy
            raise InputError(f"KV proof: {what_drops} drops tokens at decode steps, and no list says which ones")
        if rule.eviction.evicts and cache not in kept:
            raise InputError(f"KV proof: {what} do not say what cache {cache} keeps under {policy}")
        if rule.reads_a_part and cache not in read:
            raise InputError(f"KV proof: {what} do not say what steps read of cache {cache} under {policy}")


def made_by(engine: EngineDirectory, options: RunOptions) -> MadeBy:
    """Return the description of an engine in its proofs."""
    found = fingerprint_of(engine)
    return MadeBy(
        found.engine, found.weights, found.model, found.parameters, found.model_name, found.policy_name,
        options.prefill_precision,
    )  # fmt: skip
