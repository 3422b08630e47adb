"""What a verification found: plain data that prints as a table and stores as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not applicable", "left out"]


@dataclass(frozen=True)
class Check:
    """One measured figure. `passed` is None where a figure is reported without a bar."""

    name: str
    sample: str
    """What it was measured on, with its count: "24 lists", "3 rows x 32 steps"."""
    measured: float | str
    bar: str = ""
    passed: bool | None = None
    detail: str = ""
    """In a few words: what the figure does not say."""
    note: str = ""
    """What exactly was run; in the stored report only."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; a measured NaN or infinity becomes text."""
        return {
            "name": self.name,
            "sample": self.sample,
            "measured": json_number(self.measured),
            "bar": self.bar or None,
            "passed": self.passed,
            "detail": self.detail or None,
            "note": self.note or None,
        }


def at_most(name: str, sample: str, measured: float, bar: float, detail: str = "", note: str = "") -> Check:
    """A check that holds if `measured` <= `bar`; NaN fails."""
    return Check(name, sample, float(measured), f"<= {bar:g}", bool(measured <= bar), detail, note)


@dataclass
class Rung:
    """One step of the ladder, or one control. `reason` says why it is not applicable or was left out."""

    name: str
    checks: list[Check] = field(default_factory=list)
    reason: str = ""
    left_out: bool = False
    layers: list[dict[str, int]] = field(default_factory=list)
    """Measurements per layer behind the checks."""
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """Failed if one check failed; without checks it was not applicable or left out, as `reason` says."""
        if not self.checks:
            return "left out" if self.left_out else "not applicable"
        return "failed" if any(check.passed is False for check in self.checks) else "passed"

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason or None,
            "seconds": round(self.seconds, 2),
            "checks": [check.to_json() for check in self.checks],
            **({"layers": self.layers} if self.layers else {}),
        }


@dataclass(frozen=True)
class ErrorFigures:
    """How far one run's logits and tokens are from another's; None where the ladder did not measure it."""

    max_logit_error: float | None = None
    mean_kl: float | None = None
    top1_agreement: float | None = None
    first_divergence: int | None = None
    """First teacher-forced step whose top-1 token differs; None if none does."""
    greedy_match: float | None = None


@dataclass
class ErrorHalves:
    """The two halves of an engine's error, and with a checkpoint at hand the third: what the weights' format costs."""

    engine: ErrorFigures | None = None
    compression: ErrorFigures | None = None
    quantisation: ErrorFigures | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Per column, why it is empty or what it was measured on."""

    def to_json(self) -> dict[str, Any]:
        """One object per column; None where it was not measured."""
        columns = {"engine": self.engine, "compression": self.compression, "quantisation": self.quantisation}
        halves: dict[str, Any] = {
            name: {key: json_number(value) for key, value in vars(column).items()} if column else None
            for name, column in columns.items()
        }
        return {**halves, "notes": self.notes}


@dataclass
class NearTies:
    """Index lists that differ from the reference's at scores which float64 proves equal to rounding."""

    lists_compared: int = 0
    lists_admitted: int = 0
    tokens_swapped: int = 0
    near_equal_tokens: int = 0
    """Top-1 tokens that differ between logits closer than the bar."""


@dataclass
class Report:
    """The whole answer to "is this engine right?"; `passed` is what the exit code says."""

    engine: str
    level: str
    description: dict[str, Any]
    thresholds: dict[str, float | None]
    rungs: list[Rung] = field(default_factory=list)
    halves: ErrorHalves = field(default_factory=ErrorHalves)
    near_ties: NearTies = field(default_factory=NearTies)
    memory: dict[str, int] = field(default_factory=dict)
    """Peak resident bytes of this process per phase."""
    findings: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
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
        """Tables for people."""
        from kvc_trt.verify.report_text import as_text

        return as_text(self)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists, ready for `json.dumps`."""
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
            "seconds": round(self.seconds, 2),
        }


def json_number(value: float | str | None) -> float | str | None:
    """JSON knows neither NaN nor infinity: those become text."""
    return value if value is None or isinstance(value, str) or math.isfinite(value) else str(value)


def format_measured(value: float | str | None) -> str:
    """A figure for people: counts as integers, small errors with an exponent."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.2e}" if abs(value) < 1e-2 else f"{value:.4g}"
