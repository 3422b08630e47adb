"""The bars that kvc-trt sets itself beside the other engines, and whether the measurements meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.summary import PointKey, Row
from kvc_trt.models.cache_formats import AUTO

FIRST_TOKEN_BAR = 1.05
"""First token, compaction included, over that of OpenVINO GenAI at the same precision."""
STEP_BAR, FLOOR_BAR = 0.8, 1.15
"""One step over that of OpenVINO GenAI's eviction at the same token budget; else over the step's own floor."""
WHOLE_BAR, BATCH_BAR = 0.5, 0.85
"""One step from a cache of 8 bits over one from float32: of a whole cache, and of rocketkv's for a batch."""
LONG = 16384
"""Tokens of a prompt from which these two are asked for."""
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
    limit: float | None
    """The highest ratio that meets the bar; None where the figure is reported and nothing is asked of it."""
    unit: str
    floor: bool = False
    """True if a step close enough to its floor meets the bar as well."""

    @property
    def ratio(self) -> float:
        return self.figure(self.ours) / self.figure(self.peer)

    @property
    def met(self) -> bool:
        near_floor = self.floor and self.ours.token_ms <= FLOOR_BAR * self.ours.floor_ms
        return self.limit is None or self.ratio <= self.limit or near_floor


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
            yield from _best(point, what, *sides, _first_token, FIRST_TOKEN_BAR, "s")
        exact_ours = [one for one in ours if one.full_precision]
        eviction = [one for one in openvino if one.full_precision and one.reads == "stored"]
        yield from _best(point, "step, float32", exact_ours, eviction, _step, STEP_BAR, "ms", True)
        if point[0] == _SIZED:
            llama = [one for one in rows if one.runner == "llama_cpp"]
            yield from _best(point, "peak memory", exact_ours, llama, lambda row: row.peak_gib, SIZE_BAR, "GiB")
            yield from _best(point, "disk", exact_ours, llama, lambda row: row.disk_mib, SIZE_BAR, "MiB")


def bars_of_formats(points: Mapping[PointKey, Sequence[Row]]) -> Iterable[Bar]:
    """Yield the gains of a cache of 8 bits: beside OpenVINO's eviction in its own 8 bits, and beside float32."""
    for point, rows in points.items():
        of = {(one.reads, one.cache): [one] for one in rows if one.ours}
        ours, whole = of.get(("rocketkv", "int8"), []), of.get(("all", "int8"), [])
        in_float32, whole_in_float32 = of.get(("rocketkv", AUTO), []), of.get(("all", AUTO), [])
        eviction = [one for one in rows if one.runner == "openvino_genai"]
        long, batch = point[2] >= LONG, point[3] > 1
        yield from _best(point, "first token", ours, eviction, _first_token, FIRST_TOKEN_BAR, "s")
        yield from _best(point, "step", ours, eviction, _step, STEP_BAR, "ms")
        yield from _best(point, "step", ours, in_float32, _step, BATCH_BAR if long and batch else None, "ms")
        yield from _best(point, "step", whole, whole_in_float32, _step, WHOLE_BAR if long else None, "ms")


def _first_token(row: Row) -> float:
    return row.first_token_seconds


def _step(row: Row) -> float:
    return row.token_ms


def _best(
    point: PointKey,
    what: str,
    ours: Sequence[Row],
    peers: Sequence[Row],
    figure: Callable[[Row], float],
    limit: float | None,
    unit: str,
    floor: bool = False,
) -> Iterable[Bar]:
    if ours and peers:
        yield Bar(point, what, min(ours, key=figure), min(peers, key=figure), figure, limit, unit, floor)
