"""`kvc-trt profile`: how fast an engine is, how much memory it takes, and how far that is from the floor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import cloup
from click.core import ParameterSource

from kvc_trt import Engine
from kvc_trt.cli.options.output import OutputPath
from kvc_trt.cli.options.types import PREFILL_PRECISION, SEALED, Counts, TokenLengths
from kvc_trt.cli.text.printing import json_option, print_json, progress, show
from kvc_trt.cli.text.profile import profile_text
from kvc_trt.cli.text.requests import requests_text
from kvc_trt.files.atomic import json_bytes, write_together, write_whole
from kvc_trt.profile.pages.files import csv_bytes, png_bytes
from kvc_trt.profile.pages.report_page import html_bytes
from kvc_trt.profile.requests.load import DEFAULT_REPEATS, DEFAULT_WARMUP, MOST_REQUESTS

_OF_STEPS = ("contexts", "batches", "steps", "decode_seconds", "prefills", "prefill_seconds")
_OF_REQUESTS = (
    "requests", "concurrency", "input_len", "output_len", "request_rate", "rows", "warmup", "repeats", "seed", "data",
)  # fmt: skip


@cloup.command(name="profile")
@cloup.argument("engine", type=click.Path(path_type=Path))
@cloup.option_group(
    "Measurement",
    cloup.option("--contexts", type=Counts(), help="Prompt lengths.  [default: max_input_len and its halves]"),
    cloup.option("--batch", "batches", type=Counts(), help="Batch sizes.  [default: 1,8]"),
    cloup.option("--steps", type=click.IntRange(min=1), default=100, help="Decode steps per row and side."),
    cloup.option(
        "--decode-seconds",
        type=click.FloatRange(min=0),
        default=20.0,
        help="Time limit in seconds for the decode steps of a row.",
    ),
    cloup.option("--prefills", type=click.IntRange(min=1), default=3, help="Timed prefills per row and side."),
    cloup.option(
        "--prefill-seconds",
        type=click.FloatRange(min=0),
        default=60.0,
        help="Skip the time to first token where one prefill would take longer, in seconds.",
    ),
    cloup.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]"),
    PREFILL_PRECISION,
    SEALED,
)
@cloup.option_group(
    "Many requests at once (with --requests, in place of single steps)",
    cloup.option("--requests", type=click.IntRange(1, MOST_REQUESTS), help="Number of requests in a run."),
    cloup.option(
        "--concurrency",
        type=click.IntRange(1, MOST_REQUESTS),
        help="Largest number of requests in flight.  [default: the engine's max_batch_size]",
    ),
    cloup.option("--input-len", type=TokenLengths(), help="Length of a prompt in tokens.  [default: max_input_len]"),
    cloup.option("--output-len", type=TokenLengths(), help="Length of an answer in tokens.  [default: max_output_len]"),
    cloup.option(
        "--request-rate",
        type=click.FloatRange(min=0, min_open=True),
        default=math.inf,
        help="Arrivals per second, as a Poisson process.  [default: inf, all at once]",
    ),
    cloup.option(
        "--rows", type=click.IntRange(1, MOST_REQUESTS), help="Rows of the engine.  [default: the concurrency]"
    ),
    cloup.option(
        "--data",
        type=click.Path(path_type=Path, dir_okay=False),
        help="JSON lines file of prompts (docs/data.md).",
    ),
    cloup.option(
        "--warmup",
        type=click.IntRange(0, MOST_REQUESTS),
        default=DEFAULT_WARMUP,
        help="Warm-up requests, which do not count.",
    ),
    cloup.option("--repeats", type=click.IntRange(1, 100), default=DEFAULT_REPEATS, help="Runs of each side."),
    cloup.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of lengths, prompts and arrivals."),
)
@cloup.option_group(
    "Files",
    cloup.option("--csv", "csv_file", type=OutputPath(dir_okay=False), help="Write the rows as CSV."),
    cloup.option(
        "--png",
        "png_file",
        type=OutputPath(dir_okay=False),
        help="Write a plot of latency over length as PNG.",
    ),
    cloup.option(
        "-o",
        "--output",
        "directory",
        type=OutputPath(file_okay=False),
        help="Write all results to this directory: profile.json, .csv, .png and report.html; with "
        "--requests, requests.json and .csv.",
    ),
)
@json_option
def command(
    engine: Path,
    csv_file: Path | None,
    png_file: Path | None,
    directory: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure the engine in directory ENGINE beside its dense twin and the floor of a measured copy bandwidth.

    The two sides take turns, so that a drift of the machine hits both. Decode runs on caches filled synthetically; time
    to first token is that of a real prefill.

    With --requests, many requests are answered at once, as by a server: throughput and latency beside the dense twin
    with as many rows as fit into the same memory. Lengths are N, MIN:MAX (uniform) or normal:MEAN,STD.
    """
    many = given["requests"] is not None
    _refuse_others(_OF_STEPS if many else _OF_REQUESTS, "without --requests" if many else "with --requests")
    if many and png_file is not None:
        raise click.UsageError("--png draws steps, and goes without --requests")
    opened = Engine.open(
        engine, progress=progress(), **{name: given[name] for name in ("threads", "prefill_precision", "sealed")}
    )
    if many:
        result = opened.profile_requests(**{name: given[name] for name in _OF_REQUESTS})
    else:
        result = opened.profile(**{name: given[name] for name in _OF_STEPS})
    _write_files(result, csv_file, png_file, directory, many)
    if as_json:
        print_json(result)
    else:
        show(requests_text(result) if many else profile_text(result))


def _refuse_others(names: tuple[str, ...], goes: str) -> None:
    """Refuse options that nothing would read."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT):
            raise click.UsageError(f"{parameter.opts[0]} goes {goes}")


def _write_files(
    result: dict[str, Any], csv_file: Path | None, png_file: Path | None, directory: Path | None, many: bool
) -> None:
    """Make all contents before the first is written, so that an interruption leaves all files or none."""
    lines = csv_bytes(result["runs"] if many else result["rows"])
    png = png_bytes(result) if png_file or (directory and not many) else b""
    if directory is not None:
        document = json_bytes(result)
        if many:
            files = {"requests.csv": lines, "requests.json": document}
        else:
            page = html_bytes(result)
            files = {"profile.csv": lines, "profile.png": png, "report.html": page, "profile.json": document}
        write_together(directory, files)
    if csv_file is not None:
        write_whole(csv_file, lines)
    if png_file is not None:
        write_whole(png_file, png)
