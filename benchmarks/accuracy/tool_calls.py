"""The effect of compression on tool calls: the task `tool-calls` under some policies and cache formats.

    python -m benchmarks.accuracy.tool_calls [--checkpoint FILE.gguf] [--minutes 20]

Results are kept in build/accuracy/, some questions at a time, so a run that was stopped goes on where it was. Writes
benchmarks/results/accuracy-tool-calls.json; `benchmarks.accuracy.tool_calls_page` makes a table of it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks import machine, store
from benchmarks.accuracy.spent import Spent, record_of
from benchmarks.accuracy.turns import compact_cell
from kvc_trt.accuracy.draw import QuestionDraw
from kvc_trt.accuracy.grid import question_groups, variants
from kvc_trt.accuracy.measure import measure
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.accuracy.under_test.policy_engines import open_model
from kvc_trt.progress import progress_on
from kvc_trt.tasks.dataset import VERSION

NAME = "accuracy-tool-calls"
MODEL = "smollm2-135m-instruct"
LENGTH, BUDGET, SAMPLES, SEED = 640, 128, 64, 0
MAX_NEW_TOKENS = 40
"""A call has some 35 tokens."""
BLOCK = 8
"""Questions that every variant is asked before the next ones."""
POLICIES = ("full:kv_cache=int4", "full:kv_cache=int8", "full:kv_cache=k8v4", "rocketkv", "snapkv", "streaming-llm")


def main() -> None:
    """Ask the questions that the kept results lack, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--minutes", type=float, help="ask nothing new after this time")
    arguments = parser.parse_args()
    print(measured(arguments.checkpoint, arguments.minutes))


def measured(checkpoint: str | None, minutes: float | None) -> Path:
    """Ask every variant, block by block, and write the scores of the questions asked."""
    directory = machine.ROOT / "build" / "accuracy" / NAME
    until = None if minutes is None else time.monotonic() + 60 * minutes
    draw, progress = QuestionDraw(SAMPLES, SEED, MAX_NEW_TOKENS), progress_on()
    groups = question_groups(["tool-calls"], [LENGTH], ["query-aware"])
    with Spent(directory) as run, open_model(MODEL, checkpoint=checkpoint, progress=progress) as model:
        settings = {**model.describe(), **vars(draw), "tasks_version": VERSION}
        with Results(directory / RESULTS_FILE, settings) as results:
            for count in range(BLOCK, SAMPLES + 1, BLOCK):
                some = QuestionDraw(SAMPLES, SEED, MAX_NEW_TOKENS, count)
                cells = measure(model, variants(POLICIES, [BUDGET]), groups, some, results, progress, until=until)
    head = {"machine": record_of(run.total), "settings": settings, "spent": run.total}
    return store.write_result(NAME, {**head, "cells": [compact_cell(cell) for cell in cells]})


if __name__ == "__main__":
    main()
