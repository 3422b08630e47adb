"""Records of the study of two stages as its page reads them: values of a cell, differences of two, and their names."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.studies.findings import Estimate
from benchmarks.studies.records import Record
from benchmarks.studies.two_stages.cells import PUBLISHED, Cell, First, Second, SecondRule
from benchmarks.studies.two_stages.measure import BEHIND, FIELDS, IN

PLACES = (IN, BEHIND)
RULES: Mapping[str, SecondRule] = {"sparq": "sparq", "exact-topk-group": "exact"}
"""Stage 2 of the policies that keep the whole prompt and do not select by pages."""


@dataclass(frozen=True)
class Measured:
    """One place of the question in some records."""

    records: Sequence[Record]
    place: str

    def values(self, cell: Cell, name: str) -> list[float]:
        """One of FIELDS, a value for each needle; found: of those that the whole cache finds."""
        return [
            one["measured"][self.place]["cells"][cell.name][FIELDS.index(name)]
            for one in self.records
            if name != "found" or one["measured"][self.place]["whole"]
        ]

    def all(self) -> dict[str, list[list[float]]]:
        """FIELDS of every cell, a row for each needle."""
        names = self.records[0]["measured"][self.place]["cells"]
        return {name: [one["measured"][self.place]["cells"][name] for one in self.records] for name in names}

    def mean(self, cell: Cell, name: str) -> float:
        """Its mean."""
        return statistics.fmean(self.values(cell, name))

    def estimate(self, cell: Cell) -> Estimate:
        """Its divergence with an interval."""
        return Estimate.of(self.values(cell, "divergence"))

    def less(self, one: Cell, other: Cell, name: str = "divergence") -> Estimate:
        """Return the difference of two cells, needle by needle."""
        return Estimate.of([a - b for a, b in zip(self.values(one, name), self.values(other, name), strict=True)])


def alone(first: First, size: int) -> Cell:
    """Return the cell of stage 1 alone with a memory."""
    return Cell(first, size, size=size)


def with_stage_2(first: First, share: str, size: int) -> Cell:
    """Return the cell of both stages with a memory; its numbers are in the records."""
    return Cell(first, 0, Second("hybrid"), share, size)


def derived(policy: str, budget: int, rule: Second | None = None, first: First = PUBLISHED) -> Cell:
    """Return the cell of a policy at a budget; `rule` replaces its stage 2, and `first` its stage 1."""
    return Cell(first, 0, rule or Second("hybrid"), policy, budget)


def selecting(policy: str, budget: int) -> Cell:
    """Return the cell of a policy that keeps the whole prompt."""
    return derived(policy, budget, Second(RULES.get(policy, "hybrid")), First())


def nats(one: Estimate) -> str:
    """Write a difference in nats with its interval."""
    return f"{one.mean:+.2f} nats ({one.low:+.2f} to {one.high:+.2f})"


def interval(one: Estimate) -> str:
    """Write a mean with its interval."""
    return f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})"
