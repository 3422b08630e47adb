"""The files of a run: the page, the tables for programs, and the build file of the choice."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from kvc_trt.files.atomic import json_bytes, write_together
from kvc_trt.tuning.pages.tune_page import html_page
from kvc_trt.tuning.result import Tuned

PAGE, BUILD_FILE = "tune.html", "build.yaml"
COLUMNS = (
    "number", "candidate", "policy", "token_budget", "place", "why", "on_front", "row_bytes", "prompts", "quality",
    "low", "high", "lost", "lost_low", "lost_high", "equal", "step_seconds",
)  # fmt: skip


def write_files(tuned: Tuned, directory: Path) -> None:
    """Write candidates.csv, tune.json, build.yaml where a choice is good enough, and tune.html, the sign of all.

    A build file of an earlier run is removed if this run writes none.
    """
    files = {"candidates.csv": csv_bytes(tuned), "tune.json": json_bytes(tuned.to_json())}
    if tuned.good_enough:
        files[BUILD_FILE] = build_file(tuned)
    else:
        (directory / BUILD_FILE).unlink(missing_ok=True)
    write_together(directory, {**files, PAGE: html_page(tuned)})


def csv_bytes(tuned: Tuned) -> bytes:
    """A line per candidate; qualities are shares, or nats below zero. A column that does not apply is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
    writer.writeheader()
    for line in tuned.lines:
        lost = line.lost or (None, None, None)
        variant = line.candidate.variant
        writer.writerow({
            "number": line.number, "candidate": str(line.candidate), "policy": variant.policy,
            "token_budget": variant.token_budget, "place": line.place, "why": line.why, "on_front": line.on_front,
            "row_bytes": line.candidate.row_bytes, "prompts": line.prompts, "quality": line.quality, "low": line.low,
            "high": line.high, "lost": lost[0], "lost_low": lost[1], "lost_high": lost[2], "equal": line.equal,
            "step_seconds": line.step_seconds,
        })  # fmt: skip
    return text.getvalue().encode()


def build_file(tuned: Tuned) -> bytes:
    """The build of the choice, for `kvc-trt build --config`."""
    import yaml

    config, best = tuned.build, tuned.recommendation
    assert config is not None
    assert best is not None
    head = (
        f"# {best.chosen}: chosen by kvc-trt tune on {tuned.prompts} prompts of {tuned.settings['data']}\n"
        f"# kvc-trt build --config {Path(tuned.asked.directory) / BUILD_FILE} -o engines/NAME\n"
    )
    stored = {name: value for name, value in config.stored().items() if name in config.model_fields_set}
    return (head + yaml.safe_dump(stored, sort_keys=False, allow_unicode=True)).encode()
