"""The points of the measurement: a model, its weights, a context and a batch; and the selections of points."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.contenders import CONTENDERS, NEW_TOKENS, Contender
from benchmarks.peers.shapes import SHAPES, Shape
from kvc_trt.profile.model_size import prefill_operations

STARTING_SECONDS = 4
"""Seconds of one measurement beside its prefill: a new process, reading and compiling the model, the warm-up."""
_LOADED_GIGABYTES_PER_SECOND = 0.5


@dataclass(frozen=True)
class Point:
    """One place where the contenders meet."""

    shape_name: str
    weights: str
    context: int
    batch: int = 1

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    def __str__(self) -> str:
        rows = "" if self.batch == 1 else f", batch {self.batch}"
        return f"{self.shape_name} {self.weights}, {self.context:,} tokens{rows}"


@dataclass(frozen=True)
class Measurement:
    """One contender at one point."""

    point: Point
    contender: Contender

    @property
    def key(self) -> str:
        """Names it in the results."""
        point = self.point
        return f"{point.shape_name}/{point.weights}/{point.context}/{point.batch}/{self.contender.name}"

    def expected_seconds(self) -> float:
        """Return the seconds that one run takes, roughly."""
        operations = self.point.batch * prefill_operations(self.point.shape.model, self.point.context)
        loading = 4e-9 * _parameters(self.point) / _LOADED_GIGABYTES_PER_SECOND
        return STARTING_SECONDS + loading + operations / self.contender.operations_per_second + NEW_TOKENS * 0.05


def _parameters(point: Point) -> float:
    from kvc_trt.profile.model_size import count_parameters

    return count_parameters(point.shape.model).total


CORE = (
    Point("m8", "int4", 4096),
    Point("m8", "fp32", 4096),
    Point("m1b", "int4", 4096),
    Point("m8", "int4", 16384),
    Point("m8", "fp32", 16384),
)
FULL = (
    *CORE,
    Point("m8", "int8", 4096),
    Point("m8", "int8", 16384),
    Point("m8", "int4", 4096, 8),
    Point("m8", "fp32", 4096, 8),
    Point("m1b", "int4", 16384),
    Point("m8", "int4", 32768),
    Point("m8", "fp32", 32768),
    Point("m8", "int8", 32768),
)
QUICK = CORE[:1]
FORMATS = tuple(
    Point("m8", weights, context, batch)
    for batch in (1, 8)
    for context in (4096, 16384)
    for weights in ("int4", "int8")
)
SELECTIONS = {"quick": QUICK, "core": CORE, "full": FULL, "formats": FORMATS}
_SHORT = 15
"""Expected seconds up to which the short selections have every contender."""


def measurements(
    points: tuple[Point, ...], *, everybody: bool, contenders: tuple[Contender, ...] = CONTENDERS
) -> list[Measurement]:
    """Return every contender of every point; where it takes long only the core, unless `everybody` is asked for."""
    return [
        Measurement(point, contender)
        for point in points
        for contender in contenders
        if point.weights in contender.weights
        and point.context <= contender.longest
        and point.batch in contender.batches
        and (everybody or contender.core or Measurement(point, contender).expected_seconds() <= _SHORT)
    ]
