"""The points of the measurement: a server, an engine behind it, and the limits of its memory and rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Server = Literal["triton", "light", "dynamo", "apart"]
"""tritonserver; `kvc-trt serve`; `kvc-trt serve --dynamo`, and with prefill and decode in processes of their own."""

SAME_MEMORY = 640 << 20
"""Bytes that rows and one prefill may take together where a compressed and a full cache are compared."""


@dataclass(frozen=True)
class Point:
    """One server under one load."""

    name: str
    server: Server
    kind: str
    """Name of the engine in `engines.KINDS`."""
    rows: int
    memory_bytes: int | None = None

    @property
    def tool(self) -> str:
        return "perf_analyzer" if self.server == "triton" else "aiperf"


POINTS = (
    Point("triton-tiny", "triton", "tiny", 16),
    Point("light-tiny", "light", "tiny", 16),
    Point("dynamo-tiny", "dynamo", "tiny", 16),
    Point("triton-compressed", "triton", "smollm2", 32, SAME_MEMORY),
    Point("triton-full", "triton", "smollm2-full", 32, SAME_MEMORY),
    Point("light-batched", "light", "smollm2", 8),
    Point("dynamo-batched", "dynamo", "smollm2", 8),
    Point("dynamo-one-by-one", "dynamo", "smollm2", 1),
    Point("apart-compressed", "apart", "smollm2", 8),
    Point("apart-full", "apart", "smollm2-full", 8),
)
QUICK = ("triton-tiny", "light-tiny", "dynamo-tiny")


def selected(names: str) -> list[Point]:
    """Return the points whose names hold one of `names`, separated by commas; SystemExit where there is none."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    found = [point for point in POINTS if not wanted or any(name in point.name for name in wanted)]
    if not found:
        raise SystemExit(f"error: no point is named {names}; these are: {', '.join(point.name for point in POINTS)}")
    return found
