"""The profile as one HTML file: charts, bars and tables of the figures in the result, nothing computed anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvc_trt.machine import place
from kvc_trt.pages.chart import COLOURS, Chart, Series
from kvc_trt.pages.document import render
from kvc_trt.profile.pages.files import STYLE
from kvc_trt.sizes import readable_size

Result = Mapping[str, Any]
Row = Mapping[str, Any]

_KINDS = {
    "weights": COLOURS[0], "cache": COLOURS[2], "page bounds": COLOURS[5], "other state": COLOURS[1],
    "linear state": COLOURS[4], "positions": COLOURS[6], "prefill": COLOURS[3],
}  # fmt: skip
_READABLE_KIND = {"prefill": "activations of a prefill"}
_LEAST_SHARE = 0.01
"""Operators with less are shown together."""
_MEGABYTE = 1e6


def html_bytes(result: Result) -> bytes:
    """Return the page; it loads nothing, and every value is escaped."""
    engine, policy = result["engine"], result["engine"]["policy"]
    built = f"{policy['policy']}, token budget {policy['token_budget']:,}, {engine['weights']}"
    return render(
        "kvc_trt.profile.pages",
        "report.html.jinja",
        title=f"{Path(engine['model']).name}: {built}",
        engine=engine,
        machine=result["machine"],
        place=place(result["machine"]),
        bandwidth=result["floor"]["copy_bandwidth"],
        request=result["request_info"],
        findings=result["findings"],
        tiles=_tiles(result),
        sides=[(name, colour) for name, (colour, _) in STYLE.items() if _of_side(result["rows"], name)],
        latency=[(batch, _latency(result["rows"], batch)) for batch in result["request_info"]["batch_sizes"]],
        roofline=_roofline(result),
        operators=_operators(result),
        memory=_memory(result),
        decode_memory=_decode_memory(result),
        peak=readable_size(result["memory"]["peak_resident_bytes_of_the_whole_profile"]),
        first_token=_first_token(result["rows"]),
        rows=result["rows"],
        readable_size=readable_size,
    )


def _of_side(rows: Iterable[Row], side: str) -> list[Row]:
    return [row for row in rows if row["side"] == side]


def _where(row: Row) -> str:
    return f"{row['context']:,} tokens, batch {row['batch_size']}"


def _tiles(result: Result) -> list[tuple[str, str]]:
    """Return the figures to read first: the longest context at the smallest batch, and the largest memory."""
    engine = _of_side(result["rows"], "engine")
    if not engine:
        return []
    row = max(engine, key=lambda one: (one["context"], -one["batch_size"]))
    found = [(f"{row['median_itl_ms']:.2f} ms", f"per token at {_where(row)} (median)")]
    if row["speedup_over_dense"] is not None:
        ceiling = f"its traffic allows {row['ceiling_speedup']:.2f}x"
        found.append((f"{row['speedup_over_dense']:.2f}x", f"as fast as the dense twin there; {ceiling}"))
    found.append((f"{row['percent_of_floor']:.0f} %", f"of the floor: {row['floor_ms']:.2f} ms by copy bandwidth"))
    if row["median_ttft_ms"] is not None:
        found.append((f"{row['median_ttft_ms'] / 1e3:.2f} s", "to the first token there"))
    return found


def _latency(rows: Sequence[Row], batch: int) -> str:
    """Draw latency per token over context, with floors; bars reach from the median to p90."""
    series = []
    for side, (colour, marker) in STYLE.items():
        mine = [row for row in _of_side(rows, side) if row["batch_size"] == batch]
        if not mine:
            continue
        titles = [f"{side}, {_where(row)}: {row['median_itl_ms']:.3f} ms, p90 {row['p90_itl_ms']:.3f}" for row in mine]
        medians = [(row["context"], row["median_itl_ms"]) for row in mine]
        upward = [row["p90_itl_ms"] for row in mine]
        floors = [(row["context"], row["floor_ms"]) for row in mine]
        series.append(Series(f"floor of {side}", floors, colour, marker=None, line="dashed"))
        series.append(Series(side, medians, colour, marker, upward=upward, titles=titles))
    if not series:
        return ""
    ticks = sorted({row["context"] for row in rows})
    label = f"milliseconds per token over prompt tokens, batch {batch}"
    return Chart(series, "prompt tokens", "ms per token", x_ticks=ticks, label=label).svg()


def _roofline(result: Result) -> str:
    """Draw the bytes that each step moves per second against the bytes that it has to move; the copy bandwidth is the
    roof."""
    rows = result["rows"]
    if not rows:
        return ""
    roof = result["floor"]["copy_bandwidth"]["median_gb_s"]
    across = [row["bytes_read_per_step_modelled"] / _MEGABYTE for row in rows]
    ends = (min(across) / 1.25, max(across) * 1.25)
    series = [Series("copy bandwidth", [(end, roof) for end in ends], COLOURS[-1], marker=None, line="solid")]
    for side, (colour, marker) in STYLE.items():
        mine = _of_side(rows, side)
        points = [(row["bytes_read_per_step_modelled"] / _MEGABYTE, _gigabytes_per_second(row)) for row in mine]
        titles = [
            f"{side}, {_where(row)}: {readable_size(row['bytes_read_per_step_modelled'])} in "
            f"{row['median_itl_ms']:.3f} ms, {row['percent_of_floor']:.0f} % of the roof"
            for row in mine
        ]
        series.append(Series(side, points, colour, marker, line=None, titles=titles))
    label = "gigabytes per second that each step reaches, over the megabytes that it has to read"
    return Chart(series, "MB that a step has to read", "GB/s reached", label=label).svg()


def _gigabytes_per_second(row: Row) -> float:
    """Return the bytes of a step (modelled) over its median time."""
    return float(row["bytes_read_per_step_modelled"] / row["median_itl_ms"] / _MEGABYTE)


def _operators(result: Result) -> list[dict[str, Any]]:
    """Return per side the operators of a step with their share, and the share as milliseconds of the median step."""
    found = []
    for side in STYLE:
        mine = [row for row in result["operators"] if row["side"] == side]
        if not mine:
            continue
        where = (mine[0]["context"], mine[0]["batch_size"])
        rows = [row for row in _of_side(result["rows"], side) if (row["context"], row["batch_size"]) == where]
        if not rows:  # recorded, but its caches did not fit when steps were timed
            continue
        step = rows[0]["median_itl_ms"]
        shown = [row for row in mine if row["share"] >= _LEAST_SHARE]
        rest = [row for row in mine if row["share"] < _LEAST_SHARE]
        lines = [(row["operator"], row["nodes"], row["share"]) for row in shown]
        if rest:
            name = f"{len(rest)} others, each under {_LEAST_SHARE:.0%}"
            lines.append((name, sum(row["nodes"] for row in rest), sum(row["share"] for row in rest)))
        found.append({"side": side, "where": _where(mine[0]), "step_ms": step, "lines": lines})
    return found


def _memory(result: Result) -> dict[str, Any] | None:
    """Return memory by kind of both sides at the largest context and batch, measured and modelled."""
    lines = result["memory"]["rows"]
    if not lines:
        return None
    top = max((line["context"], line["batch_size"]) for line in lines)
    chosen = [line for line in lines if (line["context"], line["batch_size"]) == top]
    sides = [(side, [line for line in chosen if line["side"] == side]) for side in STYLE]
    totals = {side: sum(line["measured_bytes"] for line in mine) for side, mine in sides if mine}
    kinds = list(dict.fromkeys(line["kind"] for line in chosen))
    return {
        "where": f"{top[0]:,} tokens, batch {top[1]}",
        "largest": max(totals.values()),
        "sides": [(side, totals[side], mine) for side, mine in sides if mine],
        "kinds": [(_READABLE_KIND.get(kind, kind), _KINDS[kind]) for kind in kinds],
        "colours": _KINDS,
        "lines": chosen,
    }


def _decode_memory(result: Result) -> list[tuple[Row, Row]]:
    """Return the rows, each with its peak memory of decode steps."""
    peaks = {_key(peak): peak for peak in result["memory"]["decode"]}
    return [(row, peaks[_key(row)]) for row in result["rows"]]


def _key(row: Row) -> tuple[Any, ...]:
    return row["context"], row["batch_size"], row["side"]


def _first_token(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["median_ttft_ms"] is not None]
