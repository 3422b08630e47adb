"""`kvc-trt profile`: how fast an engine is, how much memory it takes, and how far that is from the floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvc_trt.cli.counts import Counts
from kvc_trt.cli.output import json_option, print_json, progress


@click.command(name="profile")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--contexts", type=Counts(), help="Prompt lengths.  [default: max_input_len and its halves]")
@click.option("--batch", "batches", type=Counts(), help="Batch sizes.  [default: 1,8]")
@click.option("--steps", type=click.IntRange(min=1), default=100, help="Decode steps per row and side.")
@click.option("--decode-seconds", type=click.FloatRange(min=0), default=20.0, help="A row's steps end after this.")
@click.option("--prefills", type=click.IntRange(min=1), default=3, help="Timed prefills per row and side.")
@click.option(
    "--prefill-seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    help="Leave the time to first token out where one prefill would take longer.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows as CSV.")
@click.option("--png", "png_file", type=click.Path(path_type=Path, dir_okay=False), help="Draw latency over context.")
@click.option(
    "-o", "--output", "directory", type=click.Path(path_type=Path, file_okay=False), help="Write all three files there."
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
    csv_file: Path | None,
    png_file: Path | None,
    directory: Path | None,
    as_json: bool,
) -> None:
    """Measure the engine in directory ENGINE beside its dense twin and the floor of a measured copy bandwidth.

    The two sides take turns, so that a drift of the machine hits both. Decode runs on caches filled synthetically; time
    to first token is that of a real prefill.
    """
    from kvc_trt import Engine
    from kvc_trt.cli.profile_text import profile_text

    result = Engine.open(engine, threads=threads, progress=progress()).profile(
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
        click.echo(profile_text(result))


def _write_files(result: dict[str, Any], csv_file: Path | None, png_file: Path | None, directory: Path | None) -> None:
    from kvc_trt.atomic_files import write_json, write_whole
    from kvc_trt.profile.files import csv_bytes
    from kvc_trt.profile.plot import png_bytes

    if directory is not None:
        write_json(directory / "profile.json", result)
    for path in (csv_file, directory and directory / "profile.csv"):
        if path is not None:
            write_whole(path, csv_bytes(result))
    for path in (png_file, directory and directory / "profile.png"):
        if path is not None:
            write_whole(path, png_bytes(result))
