"""Records of the study of two stages as its page reads them: values of a cell, differences of two, and their names."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.studies.figures import LineAxes, Panel, lines
from benchmarks.studies.findings import Estimate
from benchmarks.studies.records import Record
from benchmarks.studies.two_stages.cells import PUBLISHED, Cell, First, Second, SecondRule
from benchmarks.studies.two_stages.measure import BEHIND, FIELDS, IN

PLACES = (IN, BEHIND)
RULES: Mapping[str, SecondRule] = {"sparq": "sparq", "exact-topk-group": "exact"}
"""Stage 2 of the policies that keep the whole prompt and do not select by pages."""


def by_needle(records: Sequence[Record]) -> list[Record]:
    """Return one record for each needle, with the cells of all its records."""
    found: dict[tuple[str, int, int], Record] = {}
    for one in records:
        key = one["key"]["task"], one["key"]["length"], one["key"]["index"]
        if key not in found:
            found[key] = copy.deepcopy(one)
        for place in PLACES:
            found[key]["measured"][place]["cells"] |= one["measured"][place]["cells"]
    return list(found.values())


@dataclass(frozen=True)
class Measured:
    """One place of the question in some records."""

    records: Sequence[Record]
    place: str

    def under(self, names: Iterable[str]) -> Measured:
        """Return the needles that were asked for under all cells of these names."""
        cells = set(names)
        return replace(
            self, records=[one for one in self.records if cells <= one["measured"][self.place]["cells"].keys()]
        )

    def values(self, cell: Cell, name: str, beside: Cell | None = None) -> list[float]:
        """One of FIELDS, a value for each needle that was asked for under the cell, and under the one `beside` it.

        Of found, those that the whole cache finds."""
        measured = [one["measured"][self.place] for one in self.records]
        return [
            one["cells"][cell.name][FIELDS.index(name)]
            for one in measured
            if cell.name in one["cells"]
            and (beside is None or beside.name in one["cells"])
            and (name != "found" or one["whole"])
        ]

    def all(self) -> dict[str, list[list[float]]]:
        """FIELDS of every cell, a row for each needle that was asked for under it."""
        found: dict[str, list[list[float]]] = {}
        for one in self.records:
            for name, values in one["measured"][self.place]["cells"].items():
                found.setdefault(name, []).append(values)
        return found

    def mean(self, cell: Cell, name: str) -> float:
        """Its mean."""
        return statistics.fmean(self.values(cell, name))

    def estimate(self, cell: Cell) -> Estimate:
        """Its divergence with an interval."""
        return Estimate.of(self.values(cell, "divergence"))

    def less(self, one: Cell, other: Cell, name: str = "divergence") -> Estimate:
        """Return the difference of two cells, needle by needle."""
        return Estimate.of(self.differences(one, other, name))

    def differences(self, one: Cell, other: Cell, name: str = "divergence") -> list[float]:
        """Return the difference of two cells, a value for each needle that was asked for under both."""
        pairs = zip(self.values(one, name, other), self.values(other, name, one), strict=True)
        return [a - b for a, b in pairs]


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


def nats_over(
    sizes: Sequence[int], of: str, title: str, shown: Mapping[str, Sequence[Cell]], both: Sequence[Measured]
) -> bytes:
    """Draw the mean divergence of each line's cells over `sizes`, numbers `of` something; a panel for each place."""
    panels = [
        Panel(f"question {one.place}", {
            name: [one.mean(cell, "divergence") for cell in cells] for name, cells in shown.items()
        })
        for one in both
    ]  # fmt: skip
    most = max(value for panel in panels for line in panel.lines.values() for value in line if value is not None)
    axes = LineAxes(of, "nats from the whole cache", ticks=sizes, limits=(-0.03 * most, max(0.1, 1.05 * most)),
                    nested=True)  # fmt: skip
    return lines(f"{title}, mean of {len(both[0].records)} needles", panels, axes)


def nats(one: Estimate) -> str:
    """Write a difference in nats with its interval."""
    return f"{one.mean:+.2f} nats ({one.low:+.2f} to {one.high:+.2f})"


def interval(one: Estimate) -> str:
    """Write a mean with its interval."""
    return f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})"
