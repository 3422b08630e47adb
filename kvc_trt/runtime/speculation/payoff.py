"""Decide whether a pass over a draft is worth its time, from the measured times of passes and steps."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

SHARE = 0.04
"""The share of the time of plain steps that passes may lose if they save nothing."""
LENT = 2.0
"""The initial balance, in times of a step, so that the first pass need not wait for savings."""
LARGEST = 16.0
"""The largest balance, in times of a step, so that old savings do not pay for long losses."""
GUESS = 1.5
"""The assumed time of a pass, in times of a step, before one was measured."""
MEASURED = 9
"""The number of latest times whose median is used."""


class Payoff:
    """The balance of the time that passes have saved; it allows a pass only if it covers the pass's possible loss."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MEASURED))
        self._passes: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MEASURED))
        self._saved: float | None = None

    def stepped(self, rows: int, seconds: float) -> None:
        """Record the time of a plain step of `rows` rows."""
        self._steps[rows].append(seconds)
        self._add(rows, self._step(rows) * SHARE)

    def passed(self, rows: int, seconds: float) -> None:
        """Record the time of a pass of `rows` rows; `accepted` records the steps that it saves."""
        self._passes[rows].append(seconds)
        self._add(rows, self._step(rows) - seconds)

    def accepted(self, rows: int, tokens: int) -> None:
        """Record accepted draft tokens, each of which saved one of `rows` rows a step."""
        self._add(rows, tokens * self._step(rows) / rows)

    def spent(self, rows: int, seconds: float) -> None:
        """Record time spent beside the model: finding drafts, and taking them back."""
        self._add(rows, -seconds)

    def affords(self) -> bool:
        """Return whether the balance allows spending time to find drafts."""
        return self._saved is not None and self._saved >= 0

    def pays(self, rows: int, expected: float) -> bool:
        """Return whether a pass of `rows` rows is worth it if `expected` tokens of all drafts together are accepted.

        If the measured passes were too slow, one that should pay by `GUESS` is tried again once the balance is full.
        """
        if not self._steps[rows] or self._saved is None or expected <= 0:
            return False
        step = self._step(rows)
        times = self._passes[rows]
        extra = (statistics.median_low(times) if times else GUESS * step) - step
        if extra > self._saved:
            return False
        saving = expected * step / rows
        return saving > extra or (saving > (GUESS - 1) * step and self._saved >= LARGEST * step)

    def _step(self, rows: int) -> float:
        times = self._steps[rows]
        return statistics.median_low(times) if times else 0.0

    def _add(self, rows: int, seconds: float) -> None:
        step = self._step(rows)
        if self._saved is None:
            self._saved = LENT * step
        self._saved = min(self._saved + seconds, LARGEST * step)
