"""Show the scheduler's figures among Triton's metrics, as `kvc_trt_...`.

Triton takes increments, while the scheduler keeps totals, so each counter is advanced by its growth since the last
report. A histogram is shown in Prometheus's form: counters `_bucket` with the label `le`, `_sum` and `_count`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvc_trt.serving.exposition import NOW, PREFIX


class Figure(NamedTuple):
    """One value with its name, and its own label if it has one."""

    name: str
    label: tuple[str, str] | None
    value: float
    counts: bool
    """True if the figure only grows."""


def figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the values of `Scheduler.metrics` as single figures."""
    for name, value in found.items():
        full = f"{PREFIX}_{name}"
        if isinstance(value, Mapping) and "buckets" in value:
            for bound, count in {**value["buckets"], "+Inf": value["count"]}.items():
                yield Figure(f"{full}_bucket", ("le", str(bound)), count, True)
            yield Figure(f"{full}_sum", None, value["sum"], True)
            yield Figure(f"{full}_count", None, value["count"], True)
        elif isinstance(value, Mapping):
            for kind, count in value.items():
                yield Figure(f"{full}_total", ("kind", kind), count, True)
        elif name in NOW:
            yield Figure(full, None, value, False)
        else:
            yield Figure(f"{full}_total", None, value, True)


class ModelMetrics:
    """The metrics of one model, which is identified by `labels`."""

    def __init__(self, pb_utils: Any, labels: Mapping[str, str]) -> None:
        self._pb_utils, self._labels = pb_utils, labels
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[str, str] | None], Any] = {}
        self._shown: dict[tuple[str, tuple[str, str] | None], float] = {}

    def show(self, found: Mapping[str, Any]) -> None:
        """Update Triton's metrics to the figures `found`."""
        for figure in figures(found):
            key, metric = (figure.name, figure.label), self._metric(figure)
            grown = figure.value - self._shown.get(key, 0)
            if grown and figure.counts:
                metric.increment(grown)
            elif grown:
                metric.set(figure.value)
            self._shown[key] = figure.value

    def _metric(self, figure: Figure) -> Any:
        key, families = (figure.name, figure.label), self._pb_utils.MetricFamily
        if figure.name not in self._families:
            kind = families.COUNTER if figure.counts else families.GAUGE
            meaning = "Figures of kvc-trt's scheduler; see its docs/scheduler.md"
            self._families[figure.name] = families(name=figure.name, description=meaning, kind=kind)
        if key not in self._metrics:
            labels = dict(self._labels) | (dict([figure.label]) if figure.label else {})
            self._metrics[key] = self._families[figure.name].Metric(labels=labels)
        return self._metrics[key]
