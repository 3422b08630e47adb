"""docs/results/peers.md and its plots, from the result file alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.machine import ROOT
from benchmarks.page import DOCS, cells, plot, table, versions, written_by
from benchmarks.peers.bars import FLOOR_BAR, Bar, bars
from benchmarks.peers.rounds import BUSY
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.summary import PointKey, Row, by_point
from kvc_trt.accuracy.cell import mean
from kvc_trt.files.atomic import write_whole
from kvc_trt.pages.chart import COLOURS, Chart, Series

_PAGE = DOCS / "peers.md"
NOISY = "†"
"""Marks a contender whose figures say little, because other programs used the processor."""


def write(data: Mapping[str, Any]) -> Path:
    """Write the page; that of a changed tree lies beside its results, which git ignores."""
    dirty = str(data["machine"]["commit"]).endswith("-dirty")
    page = store.UNCOMMITTED / _PAGE.name if dirty else _PAGE
    points = by_point(data["measurements"].values())
    pictures = _charts(points, page.parent if dirty else ROOT / "docs" / "images")
    images = [plot(path, page) for path in pictures]
    fastest = _fastest(points)
    parts = [_head(data), *_bars(points), *images, *_answers(), fastest, *notes(data, fastest)]
    text = "\n\n".join(parts) + "\n"
    write_whole(page, text.encode())
    write_whole(page.with_suffix(".csv"), figures(points).encode())
    return page


def _head(data: Mapping[str, Any]) -> str:
    shapes = "\n".join(f"- **{shape.name}**: {shape.description}" for shape in SHAPES.values())
    return "\n".join(
        [
            "# Beside other engines on a CPU",
            "",
            written_by("python -m benchmarks.peers"),
            "",
            *machine_of("make bench-peers", data),
            "",
            shapes,
            "",
            "All engines run the same random weights and the same prompt, greedy, each in a process of its own; they "
            "take turns. *First token* is the time of the prompt, compaction included; *step* is the time of one "
            "further token. Figures are medians over the runs, with the range where there is more than one. "
            "*Floor* is the time that a step of kvc-trt needs to read its bytes at the faster of both bandwidths; the "
            "others store other bytes, so they have none here. *Peak* is the highest resident memory of the process.",
            "",
            "Engines store different bits under the same name of a format. At int4, kvc-trt has blocks of 32 with a "
            "float16 scale, an int4 head (in a tied model: 8 bits) and an embedding in 8 bits; OpenVINO has groups of "
            "128, head and embedding in 8 bits; llama.cpp has Q4_0 throughout. *Disk* shows the difference.",
            "",
            "Token budgets are not equal memory: at a budget of 512, RocketKV reads 512 pairs per step and layer and "
            "stores more; the eviction of OpenVINO and of SnapKV *stores* 512 tokens.",
        ]
    )


def machine_of(command: str, data: Mapping[str, Any]) -> list[str]:
    """Two lines: where and when the command measured, and with which versions."""
    machine, bandwidth = data["machine"], data["bandwidth"]
    return [
        f"`{command}` at commit {machine['commit']} on {machine['device']} "
        f"({', '.join(machine['vector_extensions'])}), {data['threads']} threads of {machine['usable_cores']} "
        f"cores, {machine['time_utc'][:10]}. Memory: {bandwidth['copy_bytes_per_second'] / 1e9:.1f} GB/s copied, "
        f"{bandwidth['read_bytes_per_second'] / 1e9:.1f} GB/s read.",
        versions(machine, data["versions"]),
    ]


def _bars(points: Mapping[PointKey, Sequence[Row]]) -> Iterable[str]:
    """Yield each bar at each point, met or missed."""
    if found := list(bars(points)):
        yield (
            "## The bars\n\nOur best RocketKV configuration beside the best of the peer that the bar names, at the "
            "same precision: OpenVINO GenAI for the first token, its eviction to the same token budget for the step, "
            f"llama.cpp for memory and disk.\n\n{table_of_bars(found)}"
        )


def table_of_bars(found: Iterable[Bar]) -> str:
    """Both sides of every bar with their ratio, and whether it is met."""
    rows = []
    for one in found:
        a, b = one.figure(one.ours), one.figure(one.peer)
        limit = "-" if one.limit is None else f"{one.limit:.2f}" + (f", or {FLOOR_BAR} x floor" if one.floor else "")
        mine, other = f"{a:,.2f} {one.unit} ({one.ours.contender})", f"{b:,.2f} {one.unit} ({one.peer.contender})"
        verdict = "" if one.limit is None else "met" if one.met else "**missed**"
        rows.append([point_name(one.point), one.what, mine, other, f"{one.ratio:.2f}", limit, verdict])
    return table(["point", "what", "kvc-trt", "peer", "ratio", "bar", ""], rows)


def _charts(points: Mapping[PointKey, Sequence[Row]], folder: Path) -> Iterable[Path]:
    """Draw step and first token over context for every shape and format that was measured at two contexts or more."""
    for shape, weights in dict.fromkeys((key[0], key[1]) for key in points if key[3] == 1):
        contexts = sorted(key[2] for key in points if (key[0], key[1], key[3]) == (shape, weights, 1))
        if len(contexts) < 2:
            continue
        rows = {context: points[shape, weights, context, 1] for context in contexts}
        for field, name in (("token_ms", "step, ms"), ("first_token_seconds", "first token, s")):
            fastest = sorted(rows[contexts[-1]], key=lambda one: getattr(one, field))
            names = [one.contender for one in fastest][: len(COLOURS)]
            series = [
                Series(
                    contender,
                    [(at, getattr(one, field)) for at in contexts for one in rows[at] if one.contender == contender],
                    colour,
                    "o" if contender.startswith("kvc-trt") else "s",
                )
                for contender, colour in zip(names, COLOURS, strict=False)
            ]
            path = folder / f"peers-{shape}-{weights}-{field.replace('_', '-')}.svg"
            label = f"{shape}, {weights}: {name} over prompt tokens, the {len(names)} fastest of {len(fastest)}"
            of = f"{len(names)} fastest of {len(fastest)}" if len(names) < len(fastest) else "all"
            chart = Chart(
                series, f"prompt tokens ({of})", f"{shape} {weights}: {name}", contexts, label=label, legend=True
            )
            write_whole(path, chart.svg().encode())
            yield path


def _answers() -> Iterable[str]:
    """Yield the answers under OpenVINO's eviction beside RocketKV's, where both were asked the same questions."""
    asked, ours = (store.cells_of(store.recorded_path(name)) for name in ("peers-eviction", "accuracy-smollm2"))
    if not asked:
        return
    rows = []
    for cell in asked:
        _, _, budget = cell["point"].rpartition(" ")
        policy, tokens = ("full", None) if cell["point"] == "full" else ("rocketkv", int(budget))
        wanted = {"policy": policy, "token_budget": tokens, **{name: cell[name] for name in _SAME}}
        same = [one for one in ours if all(one.get(name) == value for name, value in wanted.items())]
        count = len(cell["scores"])
        beside = _percent(same[0]["scores"][:count]) if same and len(same[0]["scores"]) >= count else "not asked"
        stored = "all" if cell["stored_tokens"] is None else f"{cell['stored_tokens']:,}"
        question = f"{cell['task']}, {cell['length']:,} tokens, {cell['framing']}"
        rows.append([question, cell["point"], stored, _percent(cell["scores"]), beside])
    heads = ["questions", "eviction keeps", "stored tokens", "answered", "RocketKV at that budget"]
    yield (
        "## Answers of OpenVINO's eviction\n\nSmolLM2-135M-Instruct, the questions of the accuracy bench, greedy. "
        "*Budget* keeps as many tokens as RocketKV may read per step; *bytes of rocketkv* as many as RocketKV stores "
        f"at that budget, both counted in float32.\n\n{table(heads, rows)}"
    )


_SAME = ("task", "mode", "length", "framing")


def _percent(scores: Sequence[float]) -> str:
    """Mean and standard error in percent, and of how many questions."""
    found = mean(scores)
    return f"{found} ({found.samples})"


def _fastest(points: Mapping[PointKey, Sequence[Row]]) -> str:
    """Return our best step and the best of the others, at every point."""
    chosen = {
        key: [one for ours in (True, False) for one in [row for row in measured if row.ours == ours][:1]]
        for key, measured in points.items()
    }
    return (
        "## The fastest step of kvc-trt and of the others\n\n[peers.csv](peers.csv) has every engine that was measured "
        f"at each point.\n\n{table_of_rows(chosen)}"
    )


def table_of_rows(points: Mapping[PointKey, Sequence[Row]]) -> str:
    """Return every row of every point with its figures and their range."""
    heads = [
        "point", "engine", "first token, s", "step, ms", "floor, ms", "of floor", "peak, GiB", "disk, MiB", "runs",
    ]  # fmt: skip
    rows = [
        [
            point_name(key), f"{one.contender}{'' if one.quiet else f' {NOISY}'}",
            f"{one.first_token_seconds:.2f}{_range(one.first_token_range, one.runs)}",
            f"{one.token_ms:.2f}{_range(one.token_range, one.runs)}", *_floor(one), f"{one.peak_gib:.2f}",
            f"{one.disk_mib:,.0f}", str(one.runs),
        ]
        for key, measured in points.items()
        for one in measured
    ]  # fmt: skip
    return table(heads, rows)


def figures(points: Mapping[PointKey, Sequence[Row]]) -> str:
    """Return every engine at every point, as CSV."""
    heads = [
        "shape", "weights", "context", "batch", "engine", "first_token_s", "first_token_s_least", "first_token_s_most",
        "step_ms", "step_ms_least", "step_ms_most", "floor_ms", "peak_gib", "disk_mib", "runs", "quiet",
    ]  # fmt: skip
    return cells(
        heads,
        (
            (
                *key, one.contender, one.first_token_seconds, *one.first_token_range, one.token_ms, *one.token_range,
                one.floor_ms if one.ours else None, one.peak_gib, one.disk_mib, one.runs, one.quiet,
            )
            for key, measured in points.items()
            for one in measured
        ),
    )  # fmt: skip


def _range(span: tuple[float, float], runs: int) -> str:
    return f" ({span[0]:.2f} to {span[1]:.2f})" if runs > 1 else ""


def _floor(row: Row) -> tuple[str, str]:
    return (f"{row.floor_ms:.2f}", f"{row.percent_of_floor:.0f} %") if row.ours else ("-", "-")


def point_name(key: PointKey) -> str:
    shape, weights, context, batch = key
    return f"{shape}, {weights}, {context:,} tokens" + ("" if batch == 1 else f", batch {batch}")


def notes(data: Mapping[str, Any], rows: str) -> list[str]:
    """Explain the mark if one of the `rows` has it, and name the points that were not measured."""
    lines = []
    if NOISY in rows:
        lines.append(
            f"{NOISY} Others used more than {BUSY:.0%} of the processor in every run; such figures are unreliable."
        )
    lines += [f"- Not measured: {key}: {reason}" for key, reason in data.get("failed", {}).items()]
    return ["\n".join(lines)] if lines else []
