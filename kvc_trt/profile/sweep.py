"""The measurement itself: for every context and batch, the engine and its dense twin in turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.profile.attribution import FunctionTime
from kvc_trt.profile.bench import Bench
from kvc_trt.profile.latency import DecodeTimes, PrefillTimes, time_decode, time_prefill
from kvc_trt.profile.memory import MemoryLine, prefill_line, standing_memory
from kvc_trt.profile.model_size import prefill_operations
from kvc_trt.profile.request import ProfileRequest
from kvc_trt.profile.subject import DecodeRun, Subject, open_subject, random_prompts, twin_for

if TYPE_CHECKING:
    from kvc_trt.engine import Engine
    from kvc_trt.methods.parameters import PolicyParameters
    from kvc_trt.progress import Progress

LARGEST_SHARE_OF_MEMORY = 0.5
"""Of the free memory, for the caches of one side."""


@dataclass(frozen=True)
class Side:
    """What was measured of the engine or of its twin at one context and batch."""

    name: str
    parameters: PolicyParameters
    decode: DecodeTimes
    prefill: PrefillTimes | None
    memory: list[MemoryLine]


@dataclass(frozen=True)
class Row:
    """One context and batch."""

    context: int
    batch: int
    engine: Side
    dense: Side | None
    """None where its caches do not fit this machine's memory."""
    compaction: FunctionTime | None
    """KvcCompact nodes of a separate, profiled prefill of the engine; None where nothing is compacted."""


@dataclass
class Sweep:
    """Everything that was measured, and what was left out and why."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def run_sweep(engine: Engine, request: ProfileRequest, progress: Progress, bench: Bench | None = None) -> Sweep:
    """Measure every context and batch of `request` at `bench`; how far it is goes to `progress`."""
    from kvc_trt.engine.program import engine_program

    program = engine_program(engine)
    sweeper = _Sweeper(open_subject("engine", program, request.threads, bench), request)
    with progress.task("profiling", len(request.contexts) * len(request.batches)) as advance:
        for context in request.contexts:
            dense = open_subject("dense", twin_for(program, context), request.threads, bench)
            for batch in request.batches:
                progress.note(f"context {context:,}, batch {batch}")
                sweeper.measure(dense, context, batch)
                advance(1)
    return sweeper.sweep


class _Sweeper:
    def __init__(self, subject: Subject, request: ProfileRequest) -> None:
        self.sweep = Sweep()
        self._subject = subject
        self._request = request
        self._last_prefill: dict[int, tuple[int, float]] = {}
        """Per batch: context and seconds of the slower side's latest prefill."""

    def measure(self, dense: Subject, context: int, batch: int) -> None:
        subjects = [subject for subject in (self._subject, dense) if _fits(subject, batch)]
        if len(subjects) < 2:
            which = "caches" if not subjects else f"{'dense' if self._subject in subjects else 'engine'} caches"
            self._leave_out(context, batch, f"the {which} do not fit this machine's memory")
        if self._subject not in subjects:
            return
        request = self._request
        runs = [DecodeRun(subject, batch, context) for subject in subjects]
        decodes = time_decode(runs, request.steps, request.decode_seconds)
        memory = [standing_memory(subject, batch) for subject in subjects]
        prefills = self._prefills(subjects, context, batch)
        for subject, lines, times in zip(subjects, memory, prefills, strict=True):
            if times is not None:
                lines.append(prefill_line(subject, times.peak, batch, context))
        compaction = None
        if prefills[0] is not None:
            compaction = self._subject.bench.compaction(self._subject, batch, context, request.prefills)
        sides = [
            Side(subject.name, subject.parameters, times, prefill, lines)
            for subject, times, prefill, lines in zip(subjects, decodes, prefills, memory, strict=True)
        ]
        self.sweep.rows.append(Row(context, batch, sides[0], sides[1] if len(sides) > 1 else None, compaction))

    def _prefills(self, subjects: list[Subject], context: int, batch: int) -> list[PrefillTimes | None]:
        expected = self._expected_prefill(subjects[-1], context, batch)
        if expected > self._request.prefill_seconds:
            reason = f"a prefill would take about {expected:.0f} s (--prefill-seconds raises the limit)"
            self._leave_out(context, batch, f"time to first token not measured, {reason}")
            return [None] * len(subjects)
        prompts = random_prompts(batch, context, self._subject.executor.limits.vocab_size)
        try:
            measured = time_prefill(subjects, prompts, self._request.prefills)
        except UnsupportedEnvironment as error:
            self._leave_out(context, batch, f"time to first token not measured: {error.message}")
            return [None] * len(subjects)
        self._last_prefill[batch] = (context, max(times.seconds.median for times in measured))
        return [*measured]

    def _expected_prefill(self, subject: Subject, context: int, batch: int) -> float:
        """Seconds of one prefill, from the latest one timed and the operations of both; first from a short one."""
        model = subject.program.model
        if batch not in self._last_prefill:
            tokens = min(context, subject.executor.limits.prompt_block)
            prompts = random_prompts(batch, tokens, subject.executor.limits.vocab_size)
            subject.prefill_seconds(prompts)
            self._last_prefill[batch] = (tokens, subject.prefill_seconds(prompts))
        tokens, seconds = self._last_prefill[batch]
        return seconds * prefill_operations(model, context) / prefill_operations(model, tokens)

    def _leave_out(self, context: int, batch: int, reason: str) -> None:
        self.sweep.left_out.append(f"context {context:,}, batch {batch}: {reason}")


def _fits(subject: Subject, rows: int) -> bool:
    needed = rows * sum(tensor.bytes_per_row() for tensor in subject.program.state)
    return needed <= LARGEST_SHARE_OF_MEMORY * subject.bench.free_bytes()
