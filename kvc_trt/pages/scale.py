"""The axes of a chart, logarithmic or linear: values to positions, and which values are labelled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_STEPS = (1, 2, 5)
_FEW_LABELS, _MANY_LABELS = 3, 7


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis from `low` to `high`, both positive, over positions `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def around(cls, values: Iterable[float], start: float, stop: float, margin: float = 1.25) -> Scale:
        """Reach a factor beyond the smallest and the largest of the positive values. ValueError if there is none."""
        positive = [value for value in values if value > 0]
        if not positive:
            raise ValueError("values: expected a positive one")
        return cls(min(positive) / margin, max(positive) * margin, start, stop)

    def __call__(self, value: float) -> float:
        """Return the position of a value; one outside lies at the nearer end."""
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round values on the axis: powers of ten, with 2 and 5 between them where these are few."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in (_STEPS[:1], _STEPS, range(1, 10)):
            found = [step * 10.0**power for power in powers for step in steps]
            inside = [value for value in found if self.low <= value <= self.high]
            if len(inside) >= _FEW_LABELS:
                break
        return inside[:: max(1, -(-len(inside) // _MANY_LABELS))]


@dataclass(frozen=True)
class LinearScale:
    """A linear axis from `low` to `high` over positions `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Return the position of a value; one outside lies at the nearer end."""
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round values on the axis: multiples of 1, 2 or 5 times a power of ten."""
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / _FEW_LABELS))
        while (self.high - self.low) / step > _MANY_LABELS:
            step *= 2.5 if f"{step:e}".startswith("2") else 2
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
