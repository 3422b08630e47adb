"""A request's answer as a tool saw it, whichever tool it was, and the figures that follow from many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.serving.engines import Expected

NEAR_TIE = 1e-3
"""Two logarithms of probabilities closer than this may change places with the number of rows (docs/scheduler.md)."""


@dataclass(frozen=True)
class Answered:
    """One request. Times are seconds on the tool's clock."""

    place: int
    """Index of the request among the different ones."""
    began: float
    arrivals: tuple[float, ...]
    """Arrival time of each piece of the answer."""
    text: str
    tokens: int
    error: str | None = None
    kvc: dict[str, Any] = field(default_factory=dict)
    """The server's report on the caches; empty if it makes none."""

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.began

    @property
    def seconds_per_token(self) -> float:
        """Time per token after the first one."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.tokens - 1)


def figures(sent: int, all_of_them: Sequence[Answered], expected: Sequence[Expected]) -> dict[str, Any]:
    """Return the figures of one run of a tool; times in seconds.

    A request counts as lost if it was sent and has no whole answer; `errors` are the texts of those that have an error.
    """
    answered = [one for one in all_of_them if one.error is None and one.arrivals]
    errors = sorted({one.error[:200] for one in all_of_them if one.error is not None})
    found: dict[str, Any] = {"sent": sent, "answered": len(answered), "lost": sent - len(answered), "errors": errors}
    if not answered:
        return found
    seconds = max(one.arrivals[-1] for one in answered) - min(one.began for one in answered)
    tokens = sum(one.tokens for one in answered)
    gaps = [b - a for one in answered for a, b in zip(one.arrivals, one.arrivals[1:], strict=False)]
    found |= {
        "seconds": seconds,
        "requests_per_second": len(answered) / seconds,
        "answer_tokens_per_second": tokens / seconds,
        "answer_tokens": tokens,
        "first_token_seconds": _spread([one.first_token_seconds for one in answered]),
        "seconds_per_token": _spread([one.seconds_per_token for one in answered]),
        "gap_seconds": _spread(gaps),
        "answer_seconds": _spread([one.arrivals[-1] - one.began for one in answered]),
        "compared": _compared(answered, expected),
    }
    kvc = [one.kvc for one in answered if one.kvc]
    found["kvc"] = {name: median(one[name] for one in kvc) for name in (kvc[0] if kvc else {})}
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: quantile(values, share) for name, share in shares.items()} | {"max": max(values)}


def _compared(answered: Sequence[Answered], expected: Sequence[Expected]) -> dict[str, int]:
    """Count answers that are those of `kvc-trt run`, those that leave them at a near-tie, and others."""
    counts = {"equal": 0, "near_tie": 0, "different": 0}
    for one in answered:
        wanted = expected[one.place]
        if one.text.strip() == wanted.text.strip():
            counts["equal"] += 1
        elif wanted.margin_where_it_differs(one.text) < NEAR_TIE:
            counts["near_tie"] += 1
        else:
            counts["different"] += 1
    return counts
