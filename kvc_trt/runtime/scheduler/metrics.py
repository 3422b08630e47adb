"""The counters and histograms of a scheduler, for a serving layer to export under its own names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SHORT_TIMES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONG_TIMES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
"""Bounds of histograms, seconds."""


class Histogram:
    """Observations, counted under the first bound that they do not exceed."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Number of observations in each interval between two bounds; the last one counts those above all bounds."""
        self.total = 0.0
        self.largest = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.largest = max(self.largest, value)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: count, sum, largest, and `buckets`, the cumulative count up to each bound."""
        up_to, buckets = 0, {}
        for bound, count in zip(self.bounds, self.counts, strict=False):
            up_to += count
            buckets[bound] = up_to
        return {"count": self.count, "sum": self.total, "largest": self.largest, "buckets": buckets}


def _short() -> Histogram:
    return Histogram(SHORT_TIMES)


def _long() -> Histogram:
    return Histogram(LONG_TIMES)


@dataclass
class Metrics:
    """The figures of one scheduler since it was made. Times are in seconds of its clock."""

    submitted: int = 0
    """Requests that joined the queue."""
    refused: int = 0
    """Requests that found the queue full."""
    ended: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended: the finish reasons of answers, and cancelled, deadline, failed."""
    prompt_tokens: int = 0
    """Tokens of the prompts that have joined, without those that came from a shared prefix."""
    generated_tokens: int = 0
    kept_tokens: int = 0
    """Prompt tokens that were kept, over all caches of all rows that have joined without a stored context."""
    evicted_tokens: int = 0
    slices: int = 0
    turns: int = 0
    """Turns that were read."""
    steps: int = 0
    seconds_waiting: Histogram = field(default_factory=_long)
    """From the request to the first slice of its prefill."""
    seconds_to_first_token: Histogram = field(default_factory=_long)
    """From the request."""
    seconds_per_token: Histogram = field(default_factory=_short)
    """From one token of an answer to its next."""
    stall_seconds: Histogram = field(default_factory=_short)
    """Slices and turns during which rows waited for their next token."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by the fields' names."""
        plain = {"ended": dict(self.ended)}
        for name, value in vars(self).items():
            if name not in plain:
                plain[name] = value.as_dict() if isinstance(value, Histogram) else value
        return plain
