"""docs/results/peers-formats.md: a cache of 8 bits beside OpenVINO's own and beside float32, by processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.page import DOCS, written_by
from benchmarks.peers import page
from benchmarks.peers.bars import bars_of_formats
from benchmarks.peers.points import FORMATS
from benchmarks.peers.runs import FORMATS_NAMES, formats_name
from benchmarks.peers.shapes import M8
from benchmarks.peers.summary import PointKey, Row, by_point
from kvc_trt.files.atomic import write_whole

_PAGE = DOCS / "peers-formats.md"
_COMMAND = "make bench-peers SELECT=formats"


def recorded(beside: Mapping[str, Any] | None = None) -> dict[str, Mapping[str, Any]]:
    """Return the results in the tree by vector extension; one of changed code (`beside`) stands alone.

    Raises SystemExit where there is none.
    """
    if beside is not None and _is_changed(beside):
        return {name: beside for name, result in FORMATS_NAMES.items() if result == formats_name(beside["machine"])}
    paths = {name: store.recorded_path(result) for name, result in FORMATS_NAMES.items()}
    found: dict[str, Mapping[str, Any]] = {name: store.read(path) for name, path in paths.items() if path.exists()}
    if not found:
        raise SystemExit(f"error: no {' or '.join(map(str, paths.values()))}; {_COMMAND} measures")
    return found


def write(results: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write the page of all processors; that of a changed tree lies beside its results, which git ignores."""
    target = store.UNCOMMITTED / _PAGE.name if any(map(_is_changed, results.values())) else _PAGE
    parts = [
        "# Caches of 8 bits beside OpenVINO's",
        written_by("python -m benchmarks.peers --select formats"),
        f"**{M8.name}**: {M8.description}. OpenVINO GenAI keeps its cache in 8 bits (`u8`) by default; here it is "
        "asked for by name. Its eviction stores 512 tokens; RocketKV reads at most 512 in a step and stores more. Both "
        "compute in float32, except for products with quantised matrices. [Beside other engines](peers.md) says how "
        "they take turns, and what the columns are.",
        *(part for name, data in results.items() for part in _of_processor(name, data)),
    ]
    write_whole(target, ("\n\n".join(parts) + "\n").encode())
    return target


def _is_changed(data: Mapping[str, Any]) -> bool:
    return str(data["machine"]["commit"]).endswith("-dirty")


def _of_processor(name: str, data: Mapping[str, Any]) -> list[str]:
    """Return the paragraphs of one processor's results: where it measured, the bars, every figure."""
    points = by_point(data["measurements"].values())
    rows = page.table_of_rows(points)
    return [
        f"## With {name}",
        "\n".join(page.machine_of(_COMMAND, data)),
        f"### The bars with {name}",
        page.table_of_bars(bars_of_formats(points)),
        f"### All that was measured with {name}",
        rows,
        *page.notes(data, rows),
        *_missing(points),
    ]


def _missing(points: Mapping[PointKey, Sequence[Row]]) -> list[str]:
    """Name the points of the selection at which nothing was measured yet."""
    keys = [(one.shape_name, one.weights, one.context, one.batch) for one in FORMATS]
    names = "; ".join(page.point_name(key) for key in keys if key not in points)
    return [f"Not measured yet: {names}."] if names else []
