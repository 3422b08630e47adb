"""What the runs of one measurement say: medians over the quiet ones, and how far they are apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.peers.rounds import BUSY


@dataclass(frozen=True)
class Row:
    """The figures of one contender at one point."""

    contender: str
    ours: bool
    full_precision: bool
    first_token_seconds: float
    first_token_spread: float
    token_ms: float
    token_spread: float
    floor_ms: float
    peak_gib: float
    disk_mib: float
    runs: int
    quiet: bool
    """Whether others left the machine alone in the runs that count."""

    @property
    def percent_of_floor(self) -> float:
        return 100 * self.floor_ms / self.token_ms


def row(entry: Mapping[str, Any]) -> Row:
    """Summarise one entry of the results: runs with a busy machine count only where there is no other."""
    quiet = [run for run in entry["runs"] if run["others_share"] <= BUSY]
    counted = quiet or entry["runs"]
    firsts = [run["first_token_seconds"] for run in counted]
    tokens = [median(run["token_ms"]) for run in counted]
    return Row(
        contender=entry["contender"],
        ours=entry["runner"] == "kvc_trt",
        full_precision=entry["full_precision"],
        first_token_seconds=median(firsts),
        first_token_spread=_spread(firsts),
        token_ms=median(tokens),
        token_spread=_spread(tokens),
        floor_ms=entry["floor_ms"],
        peak_gib=max(run["peak_resident_bytes"] for run in counted) / 2**30,
        disk_mib=entry["disk_bytes"] / 2**20,
        runs=len(counted),
        quiet=bool(quiet),
    )


def _spread(values: Sequence[float]) -> float:
    """Return the range over the median."""
    return (max(values) - min(values)) / median(values)


PointKey = tuple[str, str, int, int]


def by_point(entries: Iterable[Mapping[str, Any]]) -> dict[PointKey, list[Row]]:
    """Return the rows of every (shape, weights, context, batch), fastest step first."""
    found: dict[PointKey, list[Row]] = {}
    for entry in entries:
        key = (entry["shape"], entry["weights"], entry["context"], entry["batch"])
        found.setdefault(key, []).append(row(entry))
    return {key: sorted(rows, key=lambda one: one.token_ms) for key, rows in found.items()}
