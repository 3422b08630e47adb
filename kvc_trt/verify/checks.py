"""The results of a rung of verification: measured figures, and whether each is within its bar."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not applicable", "left out"]


@dataclass(frozen=True)
class Check:
    """One measured figure. `passed` is None for a figure without a bar."""

    name: str
    sample: str
    """The objects that were measured, with their number: "24 lists", "3 rows x 32 steps"."""
    measured: float | str
    bar: str = ""
    passed: bool | None = None
    detail: str = ""
    """A few words of explanation, shown beside the figure."""
    note: str = ""
    """A description of the exact run; only the stored report shows it."""

    def to_json(self) -> dict[str, Any]:
        """Return the check as plain values; a measured NaN or infinity becomes text."""
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
    """Return a check that passes if `measured` <= `bar`; NaN fails."""
    return Check(name, sample, float(measured), f"<= {bar:g}", bool(measured <= bar), detail, note)


@dataclass
class Rung:
    """One step of the ladder, or one control. Without checks, `reason` says why it did not apply or was left out."""

    name: str
    checks: list[Check] = field(default_factory=list)
    reason: str = ""
    left_out: bool = False
    layers: list[dict[str, int]] = field(default_factory=list)
    """Measurements per layer that the checks summarise."""
    summary: list[str] = field(default_factory=list)
    """The findings of the rung, in sentences."""
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """Failed if one check failed; without checks it was not applicable or left out, as `reason` says."""
        if not self.checks:
            return "left out" if self.left_out else "not applicable"
        return "failed" if any(check.passed is False for check in self.checks) else "passed"

    def to_json(self) -> dict[str, Any]:
        """Return the rung as plain dictionaries and lists."""
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason or None,
            "seconds": round(self.seconds, 2),
            "checks": [check.to_json() for check in self.checks],
            **({"layers": self.layers} if self.layers else {}),
            **({"summary": self.summary} if self.summary else {}),
        }


def json_number(value: float | str | None) -> float | str | None:
    """Return a value for JSON, in which NaN and infinities become text."""
    return value if value is None or isinstance(value, str) or math.isfinite(value) else str(value)


def format_measured(value: float | str | None) -> str:
    """Return a figure as text for people: counts as integers, small errors with an exponent."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.2e}" if abs(value) < 1e-2 else f"{value:.4g}"
