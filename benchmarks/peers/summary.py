"""Summary of the runs of one measurement: medians over the quiet runs, and their range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.peers.contenders import OURS
from benchmarks.peers.rounds import BUSY
from kvc_trt.models.cache_formats import AUTO


@dataclass(frozen=True)
class Row:
    """The figures of one contender at one point."""

    contender: str
    runner: str
    reads: str
    cache: str
    full_precision: bool
    first_token_seconds: float
    first_token_range: tuple[float, float]
    token_ms: float
    token_range: tuple[float, float]
    floor_ms: float
    peak_gib: float
    disk_mib: float
    runs: int
    quiet: bool
    """True if other programs left the machine alone in the runs that count."""

    @property
    def ours(self) -> bool:
        return self.runner == OURS

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
        runner=entry["runner"],
        reads=entry["reads"],
        cache=entry.get("cache", AUTO),
        full_precision=entry["full_precision"],
        first_token_seconds=median(firsts),
        first_token_range=(min(firsts), max(firsts)),
        token_ms=median(tokens),
        token_range=(min(tokens), max(tokens)),
        floor_ms=entry["floor_ms"],
        peak_gib=max(run["peak_resident_bytes"] for run in counted) / 2**30,
        disk_mib=entry["disk_bytes"] / 2**20,
        runs=len(counted),
        quiet=bool(quiet),
    )


PointKey = tuple[str, str, int, int]


def by_point(entries: Iterable[Mapping[str, Any]]) -> dict[PointKey, list[Row]]:
    """Return the rows of every (shape, weights, context, batch), fastest step first."""
    found: dict[PointKey, list[Row]] = {}
    for entry in entries:
        key = (entry["shape"], entry["weights"], entry["context"], entry["batch"])
        found.setdefault(key, []).append(row(entry))
    return {key: sorted(rows, key=lambda one: one.token_ms) for key, rows in found.items()}
