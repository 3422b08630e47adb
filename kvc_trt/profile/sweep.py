"""Measure times and memory of the engine and its dense twin, in turn, for every context and batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.benchmark import LARGEST_SHARE_OF_MEMORY, Benchmark, OperatorTime, PartOfRun, Peak
from kvc_trt.engine.program import engine_program
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import state_tensors
from kvc_trt.profile.decode_memory import DecodePeak, decode_peak
from kvc_trt.profile.engine_weights import engine_weight_bytes
from kvc_trt.profile.model_size import cache_itemsize, prefill_operations
from kvc_trt.profile.profiled_engine import (
    DecodeRun,
    DecodeTimes,
    PrefillTimes,
    ProfiledEngine,
    open_profiled,
    random_prompts,
    time_decode,
    time_prefill,
    twin_for,
)
from kvc_trt.profile.request import ProfileRequest
from kvc_trt.profile.traffic import state_kind

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.progress import Progress

RECORDED_STEPS = 12
"""Steps in which operators are timed; the first is left out."""

_FLOAT32 = 4


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes of one kind of memory, measured and modelled."""

    kind: str
    modelled: float
    measured: float
    how: str
    """The method by which the figure was measured."""

    @property
    def difference_percent(self) -> float:
        """The measurement minus the model, in percent of the model."""
        return 100 * (self.measured / self.modelled - 1) if self.modelled else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the result's `memory` section."""
        return {
            "kind": self.kind,
            "modelled_bytes": round(self.modelled),
            "measured_bytes": round(self.measured),
            "difference_percent": self.difference_percent,
            "measured": self.how,
        }


def standing_memory(side: ProfiledEngine, rows: int) -> list[MeasuredMemory]:
    """Return weights, and the state of `rows` rows by kind; the executor's state must be allocated."""
    program, benchmark, executor = side.program, side.benchmark, side.executor
    dtype = "float32" if cache_itemsize(program.weight_format) == 4 else "float16"
    state = state_tensors(program.model, program.parameters, dtype, turns=program.extend is not None)
    modelled, measured = Counter[str](), Counter[str]()
    for tensor in state:
        modelled[state_kind(tensor.name)] += rows * tensor.bytes_per_row()
    for name, size in benchmark.state_bytes(executor).items():
        measured[state_kind(name)] += size
    rotary = _FLOAT32 * program.model.head_size * program.parameters.max_sequence_len
    weights = engine_weight_bytes(program, benchmark.weight_format(program)).resident + rotary
    return [
        MeasuredMemory("weights", benchmark.weight_copies * weights, *benchmark.weight_bytes(executor)),
        *(MeasuredMemory(kind, size, measured[kind], "allocated buffers") for kind, size in modelled.items()),
    ]


def prefill_line(side: ProfiledEngine, peak: Peak, rows: int, context: int) -> MeasuredMemory:
    """Return the measured and modelled peak of a prefill of `rows` prompts of `context` tokens."""
    block = side.executor.limits.prompt_block
    modelled = side.benchmark.prefill_bytes(side.program, rows, -(-context // block) * block)
    return MeasuredMemory("prefill", modelled, peak.above, peak.how)


@dataclass(frozen=True)
class SweepSide:
    """Measurements of the engine or its twin at one context and batch."""

    name: str
    parameters: PolicyParameters
    decode: DecodeTimes
    prefill: PrefillTimes | None
    memory: list[MeasuredMemory]
    peak: DecodePeak
    """Peak of decode steps above rest."""


@dataclass(frozen=True)
class SweepRow:
    """Measurements at one context and batch."""

    context: int
    batch: int
    engine: SweepSide
    dense: SweepSide | None
    """None if its caches do not fit in this machine's memory."""
    compaction: PartOfRun | None
    """Time of compaction in a separate, profiled prefill of the engine; None if nothing is compacted."""


@dataclass
class Sweep:
    """All measurements, and those left out with the reasons."""

    rows: list[SweepRow] = field(default_factory=list)
    operators: list[StepOperators] = field(default_factory=list)
    """Time per operator of a step, at the longest context and the smallest batch."""
    left_out: list[str] = field(default_factory=list)


def run_sweep(engine: EngineDirectory, request: ProfileRequest, progress: Progress, benchmark: Benchmark) -> Sweep:
    """Measure every context and batch of `request` on the benchmark's device."""
    program = engine_program(engine)
    sweeper = _Sweeper(open_profiled("engine", program, benchmark), request)
    with progress.task("profiling", len(request.contexts) * len(request.batches)) as advance:
        for context in request.contexts:
            dense = open_profiled("dense", twin_for(program, context), benchmark)
            for batch in request.batches:
                progress.note(f"context {context:,}, batch {batch}")
                sweeper.measure(dense, context, batch)
                advance(1)
            if context == max(request.contexts):
                sweeper.record_operators(dense, context, min(request.batches))
    return sweeper.sweep


class _Sweeper:
    def __init__(self, engine: ProfiledEngine, request: ProfileRequest) -> None:
        self.sweep = Sweep()
        self._engine = engine
        self._request = request
        self._last_prefill: dict[int, tuple[int, float]] = {}
        """Batch -> context and seconds of the slower side's latest prefill."""

    def measure(self, dense: ProfiledEngine, context: int, batch: int) -> None:
        running = [side for side in (self._engine, dense) if _fits(side, batch)]
        if len(running) < 2:
            which = "caches" if not running else f"{'dense' if self._engine in running else 'engine'} caches"
            self._leave_out(context, batch, f"the {which} do not fit this machine's memory")
        if self._engine not in running:
            return
        request = self._request
        peaks = [decode_peak(side, batch, context) for side in running]
        runs = [DecodeRun(side, batch, context) for side in running]
        decodes = time_decode(runs, request.steps, request.decode_seconds)
        memory = [standing_memory(side, batch) for side in running]
        prefills = self._prefills(running, context, batch)
        for side, lines, times in zip(running, memory, prefills, strict=True):
            if times is not None:
                lines.append(prefill_line(side, times.peak, batch, context))
        compaction = None
        if prefills[0] is not None:
            compaction = self._compaction(context, batch)
        sides = [
            SweepSide(side.name, side.parameters, times, prefill, lines, peak)
            for side, times, prefill, lines, peak in zip(running, decodes, prefills, memory, peaks, strict=True)
        ]
        self.sweep.rows.append(SweepRow(context, batch, sides[0], sides[1] if len(sides) > 1 else None, compaction))

    def record_operators(self, dense: ProfiledEngine, context: int, batch: int) -> None:
        """Record the steps of the sides whose caches fit."""
        running = [side for side in (self._engine, dense) if _fits(side, batch)]
        self.sweep.operators.extend(step_operators(running, context, batch))

    def _prefills(self, running: list[ProfiledEngine], context: int, batch: int) -> list[PrefillTimes | None]:
        expected = self._expected_prefill(running[-1], context, batch)
        if expected > self._request.prefill_seconds:
            reason = f"a prefill would take about {expected:.0f} s (--prefill-seconds raises the limit)"
            self._leave_out(context, batch, f"time to first token not measured, {reason}")
            return [None] * len(running)
        prompts = random_prompts(batch, context, self._engine.executor.limits.vocab_size)
        try:
            measured = time_prefill(running, prompts, self._request.prefills)
        except UnsupportedEnvironment as error:
            self._leave_out(context, batch, f"time to first token not measured: {error.message}")
            return [None] * len(running)
        self._last_prefill[batch] = (context, max(times.seconds.median for times in measured))
        return [*measured]

    def _expected_prefill(self, side: ProfiledEngine, context: int, batch: int) -> float:
        """Predict the seconds of one prefill from the latest timed one (at first a short one) by operations."""
        model = side.program.model
        if batch not in self._last_prefill:
            tokens = min(context, side.executor.limits.prompt_block)
            prompts = random_prompts(batch, tokens, side.executor.limits.vocab_size)
            side.prefill_seconds(prompts)
            self._last_prefill[batch] = (tokens, side.prefill_seconds(prompts))
        tokens, seconds = self._last_prefill[batch]
        return seconds * prefill_operations(model, context) / prefill_operations(model, tokens)

    def _compaction(self, context: int, batch: int) -> PartOfRun | None:
        program = self._engine.program
        prompts = random_prompts(batch, context, program.model.vocab_size)
        return self._engine.benchmark.compaction(program, prompts, self._request.prefills)

    def _leave_out(self, context: int, batch: int, reason: str) -> None:
        self.sweep.left_out.append(f"context {context:,}, batch {batch}: {reason}")


def _fits(side: ProfiledEngine, rows: int) -> bool:
    needed = rows * sum(tensor.bytes_per_row() for tensor in side.program.state)
    return needed <= LARGEST_SHARE_OF_MEMORY * side.benchmark.free_bytes()


@dataclass(frozen=True)
class StepOperators:
    """The operators of one side's step."""

    side: str
    context: int
    batch: int
    operators: list[OperatorTime]

    def as_json(self) -> list[dict[str, Any]]:
        """Return one row per operator; the shares of a side add up to one."""
        total = sum(one.seconds for one in self.operators)
        return [
            {
                "context": self.context,
                "batch_size": self.batch,
                "side": self.side,
                "operator": one.name,
                "nodes": one.calls,
                "recorded_ms": 1e3 * one.seconds,
                "share": one.seconds / total,
            }
            for one in self.operators
        ]


def step_operators(sides: Sequence[ProfiledEngine], context: int, batch: int) -> list[StepOperators]:
    """Time the operators of every side's steps over synthetic caches; a backend that cannot time them gives none."""
    found = []
    for side in sides:

        def steps(executor: Any, side: ProfiledEngine = side) -> None:
            run = DecodeRun(replace(side, executor=executor), batch, context)
            for _ in range(RECORDED_STEPS):
                run.step_seconds()

        operators = side.benchmark.operators(side.program, steps)
        if operators is not None:
            found.append(StepOperators(side.name, context, batch, operators))
    return found
