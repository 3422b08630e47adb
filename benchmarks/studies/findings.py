"""Findings beside the claims of a paper: a mean with its interval, and a verdict that follows from figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.page import paragraph, table
from kvc_trt.accuracy.faithfulness import bootstrap_interval

ENOUGH = 20
"""Documents or prompts from which on an interval is shown without a warning."""
Verdict = Literal["holds", "holds in part", "does not hold here"]


@dataclass(frozen=True)
class Estimate:
    """A mean over independent documents or prompts, with the interval that a bootstrap over them gives."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate of the mean of some values, 95 %."""
        low, high = bootstrap_interval(values)
        return cls(sum(values) / len(values), low, high, len(values))

    def percent(self, digits: int = 0) -> str:
        """In percent, with the interval."""
        return f"{100 * self.mean:.{digits}f} % ({100 * self.low:.{digits}f} to {100 * self.high:.{digits}f})"

    def points(self) -> str:
        """In points, of a difference of shares, with the interval."""
        return f"{100 * self.mean:+.0f} points ({100 * self.low:+.0f} to {100 * self.high:+.0f})"


@dataclass(frozen=True)
class Finding:
    """One claim of a paper, and the measurements of it."""

    claim: str
    """The paper's sentence in other words, with its section or figure."""
    figure: str
    count: int
    """Independent documents or prompts."""
    verdict: Verdict


def verdict(*conditions: bool) -> Verdict:
    """Return "holds" if all conditions hold, "holds in part" if some do, else "does not hold here"."""
    return "holds" if all(conditions) else "holds in part" if any(conditions) else "does not hold here"


def _shown(finding: Finding) -> str:
    return f"**{finding.verdict}**" + (", preliminary" if finding.count < ENOUGH else "")


def overview(findings: Sequence[Finding]) -> str:
    """Return the table that a study's page begins with; a note where there are few documents or prompts."""
    rows = [(one.claim, one.figure, str(one.count), _shown(one)) for one in findings]
    shown = table(("the paper", "here (95 % interval)", "n", "verdict"), rows)
    if min(one.count for one in findings) >= ENOUGH:
        return shown
    note = paragraph(
        f"Where n is below {ENOUGH}, intervals are too narrow, since a bootstrap knows no other prompts than the "
        "measured ones, and verdicts are preliminary."
    )
    return f"{shown}\n\n{note}"
