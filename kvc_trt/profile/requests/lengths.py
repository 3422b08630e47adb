"""Distributions of the lengths of prompts and answers.

`N` is a length for all, `MIN:MAX` is uniform over whole numbers, and `normal:MEAN,STD` is a normal distribution, cut at
1 and at the longest length that an engine takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError, describe

if TYPE_CHECKING:
    import numpy as np

FORMS = "N, MIN:MAX or normal:MEAN,STD"
_NUMBER = r"([0-9]{1,9})"
_UNIFORM = re.compile(f"{_NUMBER}(?::{_NUMBER})?")
_NORMAL = re.compile(r"normal:([0-9]{1,9}(?:\.[0-9]{1,9})?),([0-9]{1,9}(?:\.[0-9]{1,9})?)")


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: uniform from `low` to `high`, or normal where there is a `mean`."""

    text: str
    """The text from which it was read."""
    low: int = 1
    high: int | None = None
    """None: only the engine bounds it."""
    mean: float | None = None
    std: float = 0.0

    @classmethod
    def parse(cls, value: Lengths | str | int) -> Lengths:
        """Read a distribution; InputError for anything that is none."""
        if isinstance(value, Lengths):
            return value
        text = str(value).strip()
        if found := _NORMAL.fullmatch(text):
            return cls(text, mean=float(found[1]), std=float(found[2]))
        found = None if isinstance(value, bool) else _UNIFORM.fullmatch(text)
        if found is None:
            raise InputError(f"{describe(value)} is no distribution of lengths, expected {FORMS}")
        low, high = int(found[1]), int(found[2] or found[1])
        if not 1 <= low <= high:
            raise InputError(f"{text}: expected lengths of at least 1, the smaller one first")
        return cls(text, low, high)

    def check(self, longest: int, name: str, build_option: str) -> None:
        """Raise InputError for lengths beyond the `longest` of an engine, which `build_option` would raise."""
        most = self.high if self.mean is None else self.mean
        assert most is not None
        if not 1 <= most <= longest:
            raise InputError(
                f"{name} {self.text}: this engine takes 1 to {longest:,} tokens",
                hint=f"build it with {build_option} {most:.0f}" if most > longest else None,
            )

    def draw(self, generator: np.random.Generator, count: int, longest: int) -> list[int]:
        """Draw `count` lengths of at most `longest` tokens."""
        if self.mean is None:
            assert self.high is not None
            return [int(drawn) for drawn in generator.integers(self.low, self.high, count, endpoint=True)]
        if self.std == 0:
            return [round(self.mean)] * count
        normal = NormalDist(self.mean, self.std)
        lowest, highest = normal.cdf(0.5), normal.cdf(longest + 0.5)
        places = lowest + (highest - lowest) * generator.random(count)
        inside = (min(max(place, 1e-12), 1 - 1e-12) for place in places)
        return [min(max(round(normal.inv_cdf(place)), 1), longest) for place in inside]
