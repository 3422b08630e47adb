"""docs/results/peers.md and its plots, from the result file alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, UNCOMMITTED
from benchmarks.peers.rounds import BUSY
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.summary import PointKey, Row, by_point
from kvc_trt.atomic_files import write_whole

_PAGE = ROOT / "docs" / "results" / "peers.md"


def write(data: Mapping[str, Any]) -> Path:
    """Write the page; that of a changed tree lies beside its results, which git ignores."""
    dirty = str(data["machine"]["commit"]).endswith("-dirty")
    page = UNCOMMITTED / _PAGE.name if dirty else _PAGE
    points = by_point(data["measurements"].values())
    text = "\n\n".join([_head(data), *_bars(points), *_tables(points), _notes(data)]) + "\n"
    write_whole(page, text.encode())
    return page


def _head(data: Mapping[str, Any]) -> str:
    machine, bandwidth = data["machine"], data["bandwidth"]
    versions = {**{name: machine["versions"][name] for name in ("kvc_trt", "onnxruntime")}, **data["versions"]}
    shapes = "\n".join(f"- **{shape.name}**: {shape.description}" for shape in SHAPES.values())
    return "\n".join(
        [
            "# Beside other engines on a CPU",
            "",
            "<!-- written by `python -m benchmarks.peers`; change that, not this page -->",
            "",
            f"`make bench-peers` at commit {machine['commit']} on {machine['device']} "
            f"({', '.join(machine['vector_extensions'])}), {data['threads']} threads of {machine['usable_cores']} "
            f"cores, {machine['time_utc'][:10]}. Memory: {bandwidth['copy_bytes_per_second'] / 1e9:.1f} GB/s copied, "
            f"{bandwidth['read_bytes_per_second'] / 1e9:.1f} GB/s read.",
            "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + ".",
            "",
            shapes,
            "",
            "All engines run the same random weights and the same prompt, greedy, each in a process of its own; they "
            "take turns. *First token* is the time of the prompt, compaction included; *step* is the time of one "
            "further token. Figures are medians over the runs, with the range over the median. *Floor*: the bytes that "
            "a step has to read (weights, and the cache as the engine stores it) over the faster of both bandwidths. "
            "*Peak* is the highest resident memory of the process. Rows are sorted by the step.",
            "",
            "Token budgets are not equal memory: at a budget of 512, RocketKV reads 512 pairs per step and layer and "
            "stores more; the eviction of OpenVINO and of SnapKV *stores* 512 tokens.",
        ]
    )


def _bars(points: Mapping[PointKey, Sequence[Row]]) -> Iterable[str]:
    """Our best against the best peer, point by point."""
    lines = [
        "| point | first token, ours | best peer | ours / peer | step, ours | best peer | ours / peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, rows in points.items():
        ours, peers = [one for one in rows if one.ours], [one for one in rows if not one.ours]
        if not ours or not peers:
            continue
        cells = [_point_name(key)]
        for field, unit in (("first_token_seconds", "s"), ("token_ms", "ms")):
            mine, other = (min(group, key=lambda one: getattr(one, field)) for group in (ours, peers))
            a, b = getattr(mine, field), getattr(other, field)
            cells += [f"{a:.2f} {unit} ({mine.contender})", f"{b:.2f} {unit} ({other.contender})", f"{a / b:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    if len(lines) > 2:
        yield "## Best against best\n\n" + "\n".join(lines)


def _tables(points: Mapping[PointKey, Sequence[Row]]) -> Iterable[str]:
    for key, rows in points.items():
        lines = [
            f"## {_point_name(key)}",
            "",
            "| engine | first token, s | step, ms | floor, ms | of floor | peak, GiB | disk, MiB | runs |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {one.contender}{'' if one.quiet else ' †'} | {one.first_token_seconds:.2f} "
            f"±{one.first_token_spread:.0%} | {one.token_ms:.2f} ±{one.token_spread:.0%} | {one.floor_ms:.2f} | "
            f"{one.percent_of_floor:.0f} % | {one.peak_gib:.2f} | {one.disk_mib:,.0f} | {one.runs} |"
            for one in rows
        ]
        yield "\n".join(lines)


def _point_name(key: PointKey) -> str:
    shape, weights, context, batch = key
    return f"{shape}, {weights}, {context:,} tokens" + ("" if batch == 1 else f", batch {batch}")


def _notes(data: Mapping[str, Any]) -> str:
    lines = [f"† Others used more than {BUSY:.0%} of the processor in every run; such figures say little."]
    lines += [f"- Not measured: {key}: {reason}" for key, reason in data.get("failed", {}).items()]
    return "\n".join(lines)
