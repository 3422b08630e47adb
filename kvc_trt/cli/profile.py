"""`kvc-trt profile`: how fast an engine is, how much memory it takes, and how far that is from the floor."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import cloup

from kvc_trt import Engine
from kvc_trt.backends.run_options import PrefillPrecision
from kvc_trt.cli.option_types import PREFILL_PRECISION, SEALED, Counts
from kvc_trt.cli.text.printing import json_option, print_json, progress, show
from kvc_trt.errors import escaped
from kvc_trt.files.atomic import json_bytes, write_together, write_whole
from kvc_trt.machine import place
from kvc_trt.profile.pages.files import csv_bytes, png_bytes
from kvc_trt.profile.pages.report_page import html_bytes
from kvc_trt.sizes import readable_size
from kvc_trt.tables import terminal_columns, text_table

WIDTH = 120
"""Findings wrap here, on a wider terminal too."""
Result = Mapping[str, Any]


@cloup.command(name="profile")
@cloup.argument("engine", type=click.Path(path_type=Path))
@cloup.option_group(
    "What is measured",
    cloup.option("--contexts", type=Counts(), help="Prompt lengths.  [default: max_input_len and its halves]"),
    cloup.option("--batch", "batches", type=Counts(), help="Batch sizes.  [default: 1,8]"),
    cloup.option("--steps", type=click.IntRange(min=1), default=100, help="Decode steps per row and side."),
    cloup.option("--decode-seconds", type=click.FloatRange(min=0), default=20.0, help="A row's steps end after this."),
    cloup.option("--prefills", type=click.IntRange(min=1), default=3, help="Timed prefills per row and side."),
    cloup.option(
        "--prefill-seconds",
        type=click.FloatRange(min=0),
        default=60.0,
        help="Leave the time to first token out where one prefill would take longer.",
    ),
    cloup.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]"),
    PREFILL_PRECISION,
    SEALED,
)
@cloup.option_group(
    "Files",
    cloup.option("--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows as CSV."),
    cloup.option(
        "--png", "png_file", type=click.Path(path_type=Path, dir_okay=False), help="Draw latency over length."
    ),
    cloup.option(
        "-o",
        "--output",
        "directory",
        type=click.Path(path_type=Path, file_okay=False),
        help="All of it there: profile.json, .csv, .png and report.html.",
    ),
)
@json_option
def command(
    engine: Path,
    contexts: tuple[int, ...] | None,
    batches: tuple[int, ...] | None,
    steps: int,
    decode_seconds: float,
    prefills: int,
    prefill_seconds: float,
    threads: int | None,
    prefill_precision: PrefillPrecision,
    sealed: bool,
    csv_file: Path | None,
    png_file: Path | None,
    directory: Path | None,
    as_json: bool,
) -> None:
    """Measure the engine in directory ENGINE beside its dense twin and the floor of a measured copy bandwidth.

    The two sides take turns, so that a drift of the machine hits both. Decode runs on caches filled synthetically; time
    to first token is that of a real prefill.
    """
    opened = Engine.open(
        engine, threads=threads, prefill_precision=prefill_precision, sealed=sealed, progress=progress()
    )
    result = opened.profile(
        contexts=contexts,
        batches=batches,
        steps=steps,
        decode_seconds=decode_seconds,
        prefills=prefills,
        prefill_seconds=prefill_seconds,
    )
    _write_files(result, csv_file, png_file, directory)
    if as_json:
        print_json(result)
    else:
        show(_profile_text(result))


def _write_files(result: dict[str, Any], csv_file: Path | None, png_file: Path | None, directory: Path | None) -> None:
    """Make all contents before the first is written, so that an interruption leaves all files or none."""
    csv, png = csv_bytes(result), png_bytes(result) if png_file or directory else b""
    if directory is not None:
        files = {"profile.csv": csv, "profile.png": png, "report.html": html_bytes(result)}
        write_together(directory, {**files, "profile.json": json_bytes(result)})
    if csv_file is not None:
        write_whole(csv_file, csv)
    if png_file is not None:
        write_whole(png_file, png)


def _profile_text(result: Result) -> str:
    """Return head, decode, first token, memory and findings, each an aligned table."""
    sections = (_head(result), _decode(result), _first_token(result), _memory(result), _findings(result))
    return "\n\n".join(section for section in sections if section)


def _head(result: Result) -> str:
    engine, machine, copy = result["engine"], result["machine"], result["floor"]["copy_bandwidth"]
    policy = engine["policy"]
    lines = (
        f"{engine['directory']}: {engine['model']}, policy {policy['policy']}, token budget "
        f"{policy['token_budget']:,}, weights {engine['weights']}, backend {engine['backend']}",
        f"machine: {place(machine)}",
        f"copy bandwidth (measured, read and written): {copy['median_gb_s']:.1f} GB/s +- {copy['std_gb_s']:.1f} "
        f"over {copy['samples']} copies of {readable_size(copy['buffer_bytes'])}",
    )
    return "\n".join(map(escaped, lines))


def _decode(result: Result) -> str:
    rows = [
        [
            f"{row['context']:,}",
            row["batch_size"],
            row["side"],
            *(f"{row[f'{kind}_itl_ms']:.3f}" for kind in ("p50", "p90", "p99")),
            f"{row['system_output_throughput_tok_s']:,.1f}",
            readable_size(row["bytes_read_per_step_modelled"]),
            f"{row['floor_ms']:.3f}",
            f"{row['percent_of_floor']:.0f}%",
            _times(row["speedup_over_dense"]),
            _times(row["ceiling_speedup"]),
            f"{row['samples']} +-{row['noise_percent']:.0f}%",
        ]
        for row in result["rows"]
    ]
    headers = (
        "context", "batch", "side", "ms p50", "p90", "p99", "tokens/s", "read/step", "floor ms", "of floor", "speed-up",
        "ceiling", "samples",
    )  # fmt: skip
    heading = "decode, one step (measured; cache filled synthetically; read/step, floor and ceiling modelled)"
    return _section(heading, headers, rows, left=(2,))


def _first_token(result: Result) -> str:
    measured = [row for row in result["rows"] if row["median_ttft_ms"] is not None]
    if not measured:
        return ""
    rows = [
        [
            f"{row['context']:,}",
            row["batch_size"],
            row["side"],
            _number(row["median_ttft_ms"]),
            _number(row["std_ttft_ms"]),
            _number(row["prefill_ms"]),
            _number(row["compaction_ms"]),
            f"{row['compaction_share_of_prefill']:.1%}",
            "" if row["prefill_minus_dense_ms"] is None else f"{row['prefill_minus_dense_ms']:+.1f}",
        ]
        for row in measured
    ]
    headers = (
        "context", "batch", "side", "first token ms", "std", "prefill ms", "compaction ms", "share", "minus dense ms"
    )  # fmt: skip
    samples = measured[0]["ttft_samples"]
    heading = (
        f"time to first token (measured, median of {samples}; compaction: its nodes' share in the executor's profile)"
    )
    return _section(heading, headers, rows, left=(2,))


def _memory(result: Result) -> str:
    """Return the memory of the largest row; the others are in the JSON."""
    lines = result["memory"]["rows"]
    if not lines:
        return ""
    top = max((line["context"], line["batch_size"]) for line in lines)
    chosen = [line for line in lines if (line["context"], line["batch_size"]) == top]
    rows = [
        [
            line["side"],
            line["kind"],
            readable_size(line["modelled_bytes"]),
            readable_size(line["measured_bytes"]),
            f"{line['difference_percent']:+.1f}%",
            line["measured"],
        ]
        for line in chosen
    ]
    peak = readable_size(result["memory"]["peak_resident_bytes_of_the_whole_profile"])
    heading = f"memory at {top[0]:,} tokens, batch {top[1]}"
    text = _section(heading, ("side", "kind", "modelled", "measured", "apart", "measured as"), rows, left=(0, 1, 5))
    return f"{text}\npeak resident memory of this process, engine and twin together: {peak}"


def _findings(result: Result) -> str:
    return "\n".join(["findings", *(_bullet(finding) for finding in result["findings"])])


def _bullet(sentence: str) -> str:
    return textwrap.fill(
        sentence, min(WIDTH, terminal_columns()), initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
    )


def _section(heading: str, headers: Sequence[str], rows: Iterable[Sequence[object]], *, left: Sequence[int]) -> str:
    right = [index for index in range(len(headers)) if index not in left]
    return f"{heading}\n{text_table(headers, rows, right=right)}"


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:,.1f}"
