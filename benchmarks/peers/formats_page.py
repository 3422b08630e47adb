"""docs/results/peers-formats.md: a cache of 8 bits beside OpenVINO's own and beside float32, from the results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.page import DOCS, written_by
from benchmarks.peers import page
from benchmarks.peers.bars import bars_of_formats
from benchmarks.peers.points import FORMATS
from benchmarks.peers.shapes import M8
from benchmarks.peers.summary import PointKey, Row, by_point
from kvc_trt.files.atomic import write_whole

_PAGE = DOCS / "peers-formats.md"
_COMMAND = "make bench-peers SELECT=formats"


def write(data: Mapping[str, Any]) -> Path:
    """Write the page; that of a changed tree lies beside its results, which git ignores."""
    target = store.UNCOMMITTED / _PAGE.name if str(data["machine"]["commit"]).endswith("-dirty") else _PAGE
    points = by_point(data["measurements"].values())
    rows = page.table_of_rows(points)
    parts = [
        "# Caches of 8 bits beside OpenVINO's",
        written_by("python -m benchmarks.peers --select formats"),
        "\n".join(page.machine_of(_COMMAND, data)),
        f"- **{M8.name}**: {M8.description}",
        "OpenVINO GenAI keeps its cache in 8 bits (`u8`) by default; here it is asked for by name. Its eviction stores "
        "512 tokens; RocketKV reads at most 512 in a step and stores more. Both compute in float32, except for "
        "products with quantised matrices. "
        "[Beside other engines](peers.md) says how they take turns, and what the columns are.",
        f"## The bars\n\n{page.table_of_bars(bars_of_formats(points))}",
        f"## All that was measured\n\n{rows}",
        *page.notes(data, rows),
        *_missing(points),
    ]
    write_whole(target, ("\n\n".join(parts) + "\n").encode())
    return target


def _missing(points: Mapping[PointKey, Sequence[Row]]) -> list[str]:
    """Name the points of the selection at which nothing was measured yet."""
    keys = [(one.shape_name, one.weights, one.context, one.batch) for one in FORMATS]
    names = "; ".join(page.point_name(key) for key in keys if key not in points)
    return [f"Not measured yet: {names}."] if names else []
