"""The counters and histograms of a scheduler, which servers export under their own names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SHORT_TIMES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONG_TIMES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
"""The bounds of histograms in seconds, for short times and for long ones."""


class Histogram:
    """Observations, counted under the first bound that they do not exceed."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """The number of observations up to each bound and above the previous one; the last is for those above all."""
        self.total = 0.0
        self.largest = 0.0

    @property
    def count(self) -> int:
        """The number of observations."""
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
    """The number of requests and turns that were accepted."""
    refused: int = 0
    """The number of requests that were refused because the queue was full."""
    ended: Counter[str] = field(default_factory=Counter)
    """The number of requests by their end: the finish reasons of answers, and cancelled, deadline, failed."""
    prompt_tokens: int = 0
    """The number of tokens in prompts and turns that have been read, without those from a shared prefix."""
    generated_tokens: int = 0
    kept_tokens: int = 0
    """The number of prompt tokens that were kept, over all caches of all rows that joined without a stored context."""
    evicted_tokens: int = 0
    """The number of prompt tokens that were evicted, over the same caches."""
    slices: int = 0
    turns: int = 0
    """The number of turns that were read."""
    steps: int = 0
    seconds_waiting: Histogram = field(default_factory=_long)
    """The time from a request to the first slice of its prefill, or from a turn to its reading."""
    seconds_to_first_token: Histogram = field(default_factory=_long)
    """The time from a request to the first token of its answer."""
    seconds_per_token: Histogram = field(default_factory=_short)
    """The time from one token of an answer to the next."""
    stall_seconds: Histogram = field(default_factory=_short)
    """The times of slices and turns during which rows waited for their next token."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values by the names of their fields."""
        plain = {"ended": dict(self.ended)}
        for name, value in vars(self).items():
            if name not in plain:
                plain[name] = value.as_dict() if isinstance(value, Histogram) else value
        return plain
