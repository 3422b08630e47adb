"""What kvc-trt asks of itself beside the other engines, and whether the measurements meet it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.summary import PointKey, Row

FIRST_TOKEN_BAR = 1.05
"""First token, compaction included, over that of OpenVINO GenAI at the same precision."""
STEP_BAR, FLOOR_BAR = 0.8, 1.15
"""One step over that of OpenVINO GenAI's eviction at the same token budget; else over the step's own floor."""
SIZE_BAR = 1.2
"""Peak memory and disk over llama.cpp's, on the larger shape."""
_SIZED = "m1b"


@dataclass(frozen=True)
class Bar:
    """One comparison at one point: our best RocketKV configuration that qualifies, beside the peer's best."""

    point: PointKey
    what: str
    ours: Row
    peer: Row
    figure: Callable[[Row], float]
    limit: float
    unit: str
    floor: bool = False
    """Whether a step close enough to its floor meets the bar as well."""

    @property
    def ratio(self) -> float:
        return self.figure(self.ours) / self.figure(self.peer)

    @property
    def met(self) -> bool:
        near_floor = self.floor and self.ours.token_ms <= FLOOR_BAR * self.ours.floor_ms
        return self.ratio <= self.limit or near_floor


def bars(points: Mapping[PointKey, Sequence[Row]]) -> Iterable[Bar]:
    """Yield the bars of every point at which both sides were measured."""
    for point, rows in points.items():
        ours = [one for one in rows if one.ours and one.reads == "rocketkv"]
        openvino = [one for one in rows if one.runner == "openvino_genai"]
        for exact, what in ((True, "first token, float32"), (False, "first token, bfloat16 allowed")):
            sides = (
                [one for one in ours if one.full_precision == exact],
                [one for one in openvino if one.full_precision == exact],
            )
            yield from _best(point, what, *sides, lambda row: row.first_token_seconds, FIRST_TOKEN_BAR, "s")
        exact_ours = [one for one in ours if one.full_precision]
        eviction = [one for one in openvino if one.full_precision and one.reads == "stored"]
        yield from _best(point, "step, float32", exact_ours, eviction, lambda row: row.token_ms, STEP_BAR, "ms", True)
        if point[0] == _SIZED:
            llama = [one for one in rows if one.runner == "llama_cpp"]
            yield from _best(point, "peak memory", exact_ours, llama, lambda row: row.peak_gib, SIZE_BAR, "GiB")
            yield from _best(point, "disk", exact_ours, llama, lambda row: row.disk_mib, SIZE_BAR, "MiB")


def _best(
    point: PointKey,
    what: str,
    ours: Sequence[Row],
    peers: Sequence[Row],
    figure: Callable[[Row], float],
    limit: float,
    unit: str,
    floor: bool = False,
) -> Iterable[Bar]:
    if ours and peers:
        yield Bar(point, what, min(ours, key=figure), min(peers, key=figure), figure, limit, unit, floor)
