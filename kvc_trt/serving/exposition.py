"""Write a scheduler's figures as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PREFIX = "kvc_trt"
NOW = frozenset(
    {"waiting", "joining", "running", "staying", "cache_bytes", "cache_bytes_in_use", "handoff_slots_free",
     "handoff_slots_held"}
)  # fmt: skip
"""The figures that can fall as well as rise, which Prometheus calls gauges."""


def exposition(figures: Mapping[str, Any], labels: Mapping[str, str], *, gauges: frozenset[str] = NOW) -> str:
    """Return plain values (`Scheduler.metrics`) as Prometheus text: counters, gauges, and histograms in seconds.

    A mapping of names to counts becomes one counter with the label `kind`. Every line carries `labels`.
    """
    return "".join(f"{line}\n" for name, value in figures.items() for line in _lines(name, value, labels, gauges))


def merged(texts: Iterable[str]) -> str:
    """Merge several Prometheus texts into one, in which each metric is described once and its lines are together."""
    described: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith("# "):
                name = " ".join(line.split()[2:3])
                lines = described.setdefault(name, [])
                if not any(one.startswith(line[:6]) for one in lines):
                    lines.append(line)
            elif line:
                described.setdefault(name, []).append(line)
    return "".join(f"{line}\n" for lines in described.values() for line in lines)


def _lines(name: str, value: Any, labels: Mapping[str, str], gauges: frozenset[str]) -> Iterator[str]:
    full = f"{PREFIX}_{name}"
    if isinstance(value, Mapping) and "buckets" in value:
        yield f"# TYPE {full} histogram"
        for bound, count in value["buckets"].items():
            yield f"{full}_bucket{_written({**labels, 'le': str(bound)})} {count}"
        yield f"{full}_bucket{_written({**labels, 'le': '+Inf'})} {value['count']}"
        yield f"{full}_sum{_written(labels)} {value['sum']}"
        yield f"{full}_count{_written(labels)} {value['count']}"
    elif isinstance(value, Mapping):
        yield f"# TYPE {full}_total counter"
        for kind, count in value.items():
            yield f"{full}_total{_written({**labels, 'kind': kind})} {count}"
    elif name in gauges:
        yield f"# TYPE {full} gauge"
        yield f"{full}{_written(labels)} {value}"
    else:
        yield f"# TYPE {full}_total counter"
        yield f"{full}_total{_written(labels)} {value}"


def _written(labels: Mapping[str, str]) -> str:
    quoted = (f'{name}="{_escaped(text)}"' for name, text in labels.items())
    return "{" + ",".join(quoted) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
