"""The time of a run by operator, from ONNX Runtime's own profile.

Loading a graph inlines model-local functions and prefixes the names of their nodes with the function's, so everything
that a body runs counts as its operator. Loops and branches report their bodies as well as themselves: every node counts
with the time that none of the nodes inside it takes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvc_trt.backends.benchmark import OperatorTime
from kvc_trt.errors import UnsupportedEnvironment

INLINED = "_inlfunc_"
BETWEEN = "between operators"
"""The time of a run outside of operators: scheduling, allocation, and recording the profile itself."""


def operator_times(profile: Path, warm_up: int = 1) -> list[OperatorTime]:
    """Return the means over the runs after the first `warm_up`, slowest operator first."""
    events = read_events(profile)
    runs = sorted(_span(event) for event in events if event.get("name") == "model_run")[warm_up:]
    nodes = sorted(filter(is_node, events), key=lambda event: (event["ts"], -event["dur"]))
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for start, stop in runs:
        inside = [event for event in nodes if start <= event["ts"] < stop]
        for label, own in _own_times(inside):
            seconds[label] += own * 1e-6
            calls[label] += 1
        seconds[BETWEEN] += max(0.0, (stop - start - _outermost(inside)) * 1e-6)
    slowest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return [OperatorTime(name, total / len(runs), calls[name] / len(runs)) for name, total in slowest_first]


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def read_events(profile: Path) -> list[dict[str, Any]]:
    """Return the events of a profile that ONNX Runtime has written; it says nothing of a disk that was full by then.

    Raises UnsupportedEnvironment for a profile that was cut short.
    """
    try:
        events: list[dict[str, Any]] = json.loads(profile.read_bytes())
    except (OSError, ValueError) as error:
        raise UnsupportedEnvironment(
            f"onnxruntime could not write its profile {profile} to the end; no space left?",
            hint="free some space, or set KVC_TRT_CACHE to a directory on a larger disk",
        ) from error
    return events


def is_node(event: Mapping[str, Any]) -> bool:
    """Return whether an event is the run of a node."""
    return event.get("cat") == "Node" and "op_name" in event.get("args", {})


def operator_of(event: Mapping[str, Any]) -> str:
    """Return the operator to which a node's event belongs: the function it was inlined from, or its own type.

    A suffix after "_" is removed; it tells whether the body, or a cache format's native operator, computes it."""
    name = str(event["name"])
    found = name[len(INLINED) :] if name.startswith(INLINED) else str(event["args"]["op_name"])
    return found.partition("_")[0]


def _own_times(nodes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the label of every node and its microseconds without those of the nodes inside it; nodes by start."""
    open_nodes: list[list[Any]] = []
    for event in nodes:
        start, stop = _span(event)
        while open_nodes and open_nodes[-1][1] <= start:
            label, _, own = open_nodes.pop()
            yield label, own
        if open_nodes:
            open_nodes[-1][2] -= event["dur"]
        open_nodes.append([operator_of(event), stop, event["dur"]])
    for label, _, own in reversed(open_nodes):
        yield label, own


def _outermost(nodes: Iterable[Mapping[str, Any]]) -> float:
    """Return the microseconds of the nodes that are not inside of another one; nodes are sorted by start."""
    total, reached = 0.0, float("-inf")
    for event in nodes:
        start, stop = _span(event)
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
