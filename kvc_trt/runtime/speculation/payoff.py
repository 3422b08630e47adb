"""Decide whether a pass over a draft is worth its time, from the measured times of passes and steps."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

SHARE = 0.04
"""Part of the time of plain steps that may be lost to passes that save nothing."""
LENT = 2.0
"""Steps' time that may be lost before anything was saved, so that the first pass need not wait."""
LARGEST = 16.0
"""Steps' time of savings that count; what was saved long ago does not pay for long losses."""
GUESS = 1.5
"""Steps' time that a pass is taken to need before there was one."""
MEASURED = 9
"""The number of latest times whose median counts."""


class Payoff:
    """The time that passes have saved. It allows a pass only where the loss, if it saves nothing, is covered."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MEASURED))
        self._passes: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MEASURED))
        self._saved: float | None = None

    def stepped(self, rows: int, seconds: float) -> None:
        """Count a plain step of `rows` rows."""
        self._steps[rows].append(seconds)
        self._add(rows, self._step(rows) * SHARE)

    def passed(self, rows: int, seconds: float) -> None:
        """Count a pass of `rows` rows, without the tokens that it turns out to save."""
        self._passes[rows].append(seconds)
        self._add(rows, self._step(rows) - seconds)

    def accepted(self, rows: int, tokens: int) -> None:
        """Count tokens of a draft that needed no step of `rows` rows."""
        self._add(rows, tokens * self._step(rows) / rows)

    def spent(self, rows: int, seconds: float) -> None:
        """Count time beside the model: looking for drafts, and taking them back."""
        self._add(rows, -seconds)

    def affords(self) -> bool:
        """Return whether there is time to look for drafts."""
        return self._saved is not None and self._saved >= 0

    def pays(self, rows: int, expected: float) -> bool:
        """Return whether a pass of `rows` rows is worth it if `expected` tokens of all drafts together are accepted.

        Where passes have seemed too slow, one that should pay is tried again once the balance has recovered.
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
