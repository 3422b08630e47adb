"""The time of a decode step of every engine that docs/choosing.md shows, and of the whole cache beside it.

    python -m benchmarks.accuracy.smollm2.steps [--checkpoint FILE.gguf] [--rounds 24]

Engines are timed as `kvc-trt profile` times them: ROWS rows with as many entries as a prompt of that length leaves,
filled synthetically. All engines of one length are open at once (4 GiB) and take their turns in every round, ten steps
each, so that a drift of the machine affects all. Some five minutes of a quiet machine. Writes
benchmarks/results/smollm2-steps.json; `benchmarks.accuracy.smollm2.choosing` writes the page.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import store
from benchmarks.accuracy.smollm2 import grid
from benchmarks.accuracy.smollm2.choices import Row, shown
from benchmarks.accuracy.smollm2.page import recorded
from benchmarks.peers.idle import Others
from kvc_trt.accuracy.answerers.policy_engines import PolicyEngines, open_model
from kvc_trt.accuracy.grid import Variant
from kvc_trt.backends.registry import program_backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.profile.profiled_engine import BLOCK, DecodeRun, open_profiled, time_blocks
from kvc_trt.profile.statistics import summarise
from kvc_trt.progress import progress_on
from kvc_trt.runtime.executor import threads_for

NAME = "smollm2-steps"
COMMAND = "python -m benchmarks.accuracy.smollm2.steps"
ROWS = 8
"""Rows of a step."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as the whole cache a step is: the median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Steps:
    """The result, by row."""

    result: Mapping[str, Any]
    by_row: Mapping[Row, Mapping[str, Any]]

    @classmethod
    def read(cls, result: Mapping[str, Any]) -> Steps:
        """Find the rows of a result."""
        found = {
            Row(Variant(one["policy"], one["token_budget"]), one["max_input_len"], one["max_output_len"]): one
            for one in result["steps"]
        }
        return cls(result, found)

    def milliseconds(self, row: Row) -> float:
        """The median step."""
        return float(self.by_row[row]["median_ms"])

    def ratio(self, row: Row) -> Ratio:
        """The whole cache's step over this one, round by round."""
        pairs = zip(self.by_row[row.whole]["rounds_ms"], self.by_row[row]["rounds_ms"], strict=True)
        ratios = [whole / own for whole, own in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(middle, low, high)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--rounds", type=int, default=24, help="turns of every engine")
    given = parser.parse_args()
    rows, others = shown(recorded()), Others()
    with open_model(grid.MODEL, checkpoint=given.checkpoint, progress=progress_on()) as model:
        found = {"settings": model.describe(), "rows": ROWS, "rounds": given.rounds, "steps_of_a_round": BLOCK}
        steps = []
        for length in sorted({row.length for row in rows}):
            steps += timed(model, [row for row in rows if row.length == length], given.rounds)
    print(store.write_result(NAME, {**found, "others_share": others.share(), **_described(model), "steps": steps}))


def timed(model: PolicyEngines, rows: Sequence[Row], rounds: int) -> list[dict[str, Any]]:
    """Time the steps of some rows in turns; a record for each."""
    benchmark = _benchmark(model)
    sides = [open_profiled(str(row.variant), model.program(row.variant, row.room), benchmark) for row in rows]
    runs = [DecodeRun(side, ROWS, row.length) for side, row in zip(sides, rows, strict=True)]
    records = []
    for row, blocks in zip(rows, time_blocks(runs, rounds * BLOCK, math.inf), strict=True):
        summary = summarise([1e3 * seconds for block in blocks for seconds in block])
        records.append({
            "policy": row.variant.policy,
            "token_budget": row.variant.token_budget,
            "max_input_len": row.length,
            "max_output_len": row.answer,
            "samples": summary.samples,
            "median_ms": summary.median,
            "p90_ms": summary.p90,
            "min_ms": summary.minimum,
            "noise_percent": summary.noise_percent,
            "rounds_ms": [round(1e3 * statistics.median(block), 3) for block in blocks],
        })  # fmt: skip
        print(f"{row.variant}, {row.length:,} tokens: {summary.median:.1f} ms", flush=True)
    return records


def _described(model: PolicyEngines) -> dict[str, Any]:
    return dict(_benchmark(model).describe())


def _benchmark(model: PolicyEngines) -> Any:
    return program_backend().program_benchmark(model.config, RunOptions(threads=threads_for(model.config)))


if __name__ == "__main__":
    main()
