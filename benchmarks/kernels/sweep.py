"""Command lines of the GPU's sweeps: counts, and single points beside the product of the lists."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.kernels.cases import FP8, IN_FORMAT
from kvc_trt import policies


@dataclass(frozen=True)
class SweepPoint:
    """One policy at one batch, context (prompt and answer together) and token budget."""

    policy: str
    """Its name, and a setting behind a colon."""
    batch: int
    context: int
    budget: int

    def __str__(self) -> str:
        """Return the point as written on a command line."""
        return f"{self.policy}/{self.batch}/{self.context}/{self.budget}"


POINTS = (
    SweepPoint("quest-matched", 1, 32768, 512),
    SweepPoint(FP8, 8, 32768, 512),
    SweepPoint(FP8, 32, 32768, 512),
    *(SweepPoint(policy, batch, 32768, 2048) for policy in IN_FORMAT.values() for batch in (8, 32)),
)
"""Points of every sweep that its lists do not contain: the pages of an uncompressed cache, bounds in fp8, formats."""


def count(text: str) -> int:
    """Parse a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def point(text: str) -> SweepPoint:
    """Parse a point from POLICY/BATCH/CONTEXT/BUDGET."""
    policy, *numbers = text.split("/")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: expected POLICY/BATCH/CONTEXT/BUDGET, as in {POINTS[0]}")
    known = [name for name, _, _ in policies.available()]
    if policy.partition(":")[0] not in known:
        raise argparse.ArgumentTypeError(f"{text!r}: no policy {policy!r}; expected one of {', '.join(known)}")
    return SweepPoint(policy, *map(count, numbers))
