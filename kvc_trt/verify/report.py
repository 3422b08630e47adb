"""The report of a verification, which is printed as tables and stored as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvc_trt.errors import escaped
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table
from kvc_trt.verify.checks import Check, Rung, format_measured, json_number

WIDTH = 160
_VERDICTS = {True: "ok", False: "FAILED", None: ""}
_FIGURES = {
    "max_logit_error": "max logit error",
    "mean_kl": "mean KL (nats)",
    "top1_agreement": "top-1 agreement",
    "first_divergence": "first divergence",
    "greedy_match": "greedy match",
}


@dataclass(frozen=True)
class ErrorFigures:
    """The differences of one run's logits and tokens from another's; None for those that the ladder did not measure."""

    max_logit_error: float | None = None
    mean_kl: float | None = None
    top1_agreement: float | None = None
    first_divergence: int | None = None
    """The first teacher-forced step whose top-1 token differs; None if none does."""
    greedy_match: float | None = None


@dataclass
class ErrorHalves:
    """The parts of an engine's error: the engine's own, and that of compression.

    A checkpoint adds the error of the weights' format, and caches in a format add the error of that format."""

    engine: ErrorFigures | None = None
    compression: ErrorFigures | None = None
    quantisation: ErrorFigures | None = None
    cache_format: ErrorFigures | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Notes by column: the reason why it is empty, or the data on which it was measured."""

    def to_json(self) -> dict[str, Any]:
        """Return one object per column, None for those that were not measured, and the notes."""
        columns = self.columns
        halves: dict[str, Any] = {
            name: {key: json_number(value) for key, value in vars(column).items()} if column else None
            for name, column in columns.items()
        }
        return {**halves, "notes": self.notes}

    @property
    def columns(self) -> dict[str, ErrorFigures | None]:
        """The columns by name; the caches' format has one only if it was measured."""
        found = {"engine": self.engine, "compression": self.compression, "quantisation": self.quantisation}
        return found if self.cache_format is None else {**found, "cache format": self.cache_format}


@dataclass
class NearTies:
    """Counts of index lists that differ from the reference's by rounding alone, as float64 scores prove."""

    lists_compared: int = 0
    lists_admitted: int = 0
    tokens_swapped: int = 0
    near_equal_tokens: int = 0
    """The number of top-1 tokens that differ, between logits closer than the bar."""


@dataclass
class Report:
    """The results of one verification; `passed` decides the exit code of `kvc-trt verify`."""

    engine: str
    level: str
    description: dict[str, Any]
    thresholds: dict[str, float | None]
    rungs: list[Rung] = field(default_factory=list)
    halves: ErrorHalves = field(default_factory=ErrorHalves)
    near_ties: NearTies = field(default_factory=NearTies)
    memory: dict[str, int] = field(default_factory=dict)
    """The peak resident bytes of this process in each phase."""
    findings: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    next_commands: list[str] = field(default_factory=list)
    """Commands that a user may run next."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if something was checked and nothing failed."""
        statuses = [rung.status for rung in self.rungs]
        return "passed" in statuses and "failed" not in statuses

    @property
    def failures(self) -> list[str]:
        """One line per failed check."""
        return [
            f"{rung.name}: {check.name} is {format_measured(check.measured)}"
            + (f", expected {check.bar}" if check.bar else "")
            + (f" ({check.detail})" if check.detail else "")
            for rung in self.rungs
            for check in rung.checks
            if check.passed is False
        ]

    def as_text(self) -> str:
        """Return aligned tables for people, at most `WIDTH` columns wide, with the verdict last."""
        about = self.description
        caches = f", caches in {about['kv_cache']}" if "kv_cache" in about else ""
        title = f"verify {self.engine}: {about['policy']} on {about['model']}, {about['weights']} weights{caches}"
        title += f", {self.level}"
        parts = [escaped(title), _ladder(self.rungs)]
        if any((self.halves.engine, self.halves.compression, self.halves.quantisation)):
            parts += ["The two halves of an engine's error (and what its weights cost)", _halves(self)]
        return "\n".join([*parts, *map(escaped, _lines(self)), _verdict(self)])

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain dictionaries and lists for `json.dumps`."""
        return {
            "engine": self.engine,
            "level": self.level,
            "passed": self.passed,
            "description": self.description,
            "rungs": [rung.to_json() for rung in self.rungs],
            "error": self.halves.to_json(),
            "near_ties": vars(self.near_ties),
            "memory": self.memory,
            "thresholds": self.thresholds,
            "findings": self.findings,
            "left_out": self.left_out,
            "next_commands": self.next_commands,
            "seconds": round(self.seconds, 2),
        }


def _ladder(rungs: Sequence[Rung]) -> str:
    rows: list[tuple[str, ...]] = []
    for rung in rungs:
        if not rung.checks:
            rows.append((rung.name, rung.status, "", "", "", "", rung.reason))
        rows += [(rung.name if number == 0 else "", *_cells(check)) for number, check in enumerate(rung.checks)]
    return text_table(("rung", "check", "on", "measured", "bar", "", "detail"), rows, widest=WIDTH)


def _cells(check: Check) -> tuple[str, ...]:
    measured = format_measured(check.measured)
    return check.name, check.sample, measured, check.bar, _VERDICTS[check.passed], check.detail


def _halves(report: Report) -> str:
    columns = report.halves.columns
    rows = [(label, *(_figure(column, figure) for column in columns.values())) for figure, label in _FIGURES.items()]
    return text_table(("", *columns), rows, widest=WIDTH)


def _figure(column: ErrorFigures | None, figure: str) -> str:
    if column is None:
        return "-"
    value = getattr(column, figure)
    if figure == "first_divergence":
        return "none" if value is None else f"step {value}"
    if value is not None and figure in ("top1_agreement", "greedy_match"):
        return f"{value:.2%}"
    return format_measured(value)


def _lines(report: Report) -> Iterable[str]:
    kernels = report.description.get("kernels")
    yield f"run by {report.description['backend']}" + (f"; kernels: {kernels}" if kernels else "")
    if (path := report.description.get("without kernels")) is not None:
        yield path
    for column, note in report.halves.notes.items():
        yield f"{column}: {note}"
    ties = report.near_ties
    yield (
        f"near-ties: {ties.lists_admitted} of {ties.lists_compared} index lists ({ties.tokens_swapped} tokens swapped, "
        f"each proven in float64); {ties.near_equal_tokens} tokens at near-equal logits"
    )
    if report.memory:
        peaks = ", ".join(f"{phase} {readable_size(bytes_)}" for phase, bytes_ in report.memory.items())
        yield f"peak resident memory: {peaks}"
    for rung in report.rungs:
        yield from (f"{rung.name}: {sentence}" for sentence in rung.summary)
    for heading, items in (
        ("finding", report.findings),
        ("left out", report.left_out),
        ("next", report.next_commands),
    ):
        for item in items:
            yield f"{heading}: {item}"


def _verdict(report: Report) -> str:
    if report.passed:
        return f"PASSED in {report.seconds:.1f} s"
    reasons = report.failures or ["nothing could be checked"]
    return "\n".join([f"FAILED in {report.seconds:.1f} s", *(f"  {escaped(reason)}" for reason in reasons)])
