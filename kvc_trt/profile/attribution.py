"""How much of a run one of our operators took, read from ONNX Runtime's own profile.

A model-local function is inlined when a graph is loaded; what were its nodes carry the function's name in front. Loops
and branches report their bodies as well as themselves, so time is the union of intervals, never their sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_INLINED = "_inlfunc_"
Interval = tuple[float, float]


@dataclass(frozen=True)
class FunctionTime:
    """One run of a graph, seconds."""

    run: float
    function: float

    @property
    def share(self) -> float:
        """Part of the run that the function took."""
        return self.function / self.run if self.run else 0.0


def function_times(profile: Path, function: str) -> list[FunctionTime]:
    """For every run in an ONNX Runtime profile: its length, and the time inside calls of `function`."""
    events = json.loads(profile.read_text(encoding="utf-8"))
    prefix = _INLINED + function + "_"
    runs = [_interval(event) for event in events if event.get("name") == "model_run"]
    inside = [
        _interval(event) for event in events if event.get("cat") == "Node" and event.get("name", "").startswith(prefix)
    ]
    return [
        FunctionTime(
            run=(stop - start) * 1e-6,
            function=_union(interval for interval in inside if start <= interval[0] < stop) * 1e-6,
        )
        for start, stop in sorted(runs)
    ]


def _interval(event: dict[str, float]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> float:
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
