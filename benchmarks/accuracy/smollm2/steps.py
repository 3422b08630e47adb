"""The time of a decode step of every engine that docs/choosing.md shows, and of the whole cache beside it.

    python -m benchmarks.accuracy.smollm2.steps [--checkpoint FILE.gguf] [--rounds 12]

Engines are timed as `kvc-trt profile` times them: ROWS rows with as many entries as a prompt of that length leaves,
filled synthetically. All engines of one length are open at once (10 GiB: each packs weights for itself) and take their
turns in every round, ten steps each, so that a drift of the machine affects all. A round in which other work took more
than BUSY of the processors does not count, and is made again. Some four minutes. Writes
benchmarks/results/smollm2-steps.json; `benchmarks.accuracy.smollm2.choosing` writes the page.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import store
from benchmarks.accuracy.smollm2 import grid
from benchmarks.accuracy.smollm2.choices import Row, shown
from benchmarks.accuracy.smollm2.page import recorded
from benchmarks.idle import Others
from benchmarks.peers.rounds import BUSY
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.policy_engines import PolicyEngines, open_model
from kvc_trt.backends.benchmark import Benchmark
from kvc_trt.backends.registry import program_backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.profile.profiled_engine import BLOCK, DecodeRun, open_profiled, time_block
from kvc_trt.profile.statistics import summarise
from kvc_trt.progress import progress_on
from kvc_trt.runtime.executor import threads_for

NAME = "smollm2-steps"
COMMAND = "python -m benchmarks.accuracy.smollm2.steps"
ROWS = 8
"""Rows of a step."""
TRIES = 3
"""At most this many times the rounds asked for are made, if too few of them are quiet."""


@dataclass(frozen=True)
class Ratio:
    """The time of the whole cache's step divided by this one's: the median over the rounds, and the quartiles."""

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
        """Return the median step."""
        return float(self.by_row[row]["median_ms"])

    def ratio(self, row: Row) -> Ratio:
        """Return the whole cache's step over this one, round by round."""
        pairs = zip(self.by_row[row.whole]["rounds_ms"], self.by_row[row]["rounds_ms"], strict=True)
        ratios = [whole / own for whole, own in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(middle, low, high)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--rounds", type=int, default=12, help="turns of every engine")
    given = parser.parse_args()
    rows = shown(recorded())
    with open_model(grid.MODEL, checkpoint=given.checkpoint, progress=progress_on()) as model:
        benchmark = program_backend().program_benchmark(model.config, RunOptions(threads=threads_for(model.config)))
        steps = []
        for length in sorted({row.length for row in rows}):
            steps += timed(model, benchmark, [row for row in rows if row.length == length], given.rounds)
        head = {"settings": model.describe(), **benchmark.describe()}
    found = {**head, "rows": ROWS, "rounds": given.rounds, "steps_of_a_round": BLOCK, "busy": BUSY, "steps": steps}
    print(store.write_result(NAME, found))


def timed(model: PolicyEngines, benchmark: Benchmark, rows: Sequence[Row], rounds: int) -> list[dict[str, Any]]:
    """Time the steps of some rows in turns; a record for each. SystemExit where too few rounds were quiet."""
    sides = [open_profiled(str(row.variant), model.program(row.variant, row.room), benchmark) for row in rows]
    runs = [DecodeRun(side, ROWS, row.length) for side, row in zip(sides, rows, strict=True)]
    quiet = quiet_rounds(runs, rounds)
    records = []
    for place, row in enumerate(rows):
        blocks = [[1e3 * seconds for seconds in one[place]] for one in quiet]
        summary = summarise([step for block in blocks for step in block])
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
            "rounds_ms": [round(statistics.median(block), 3) for block in blocks],
        })  # fmt: skip
        print(f"{row.variant}, {row.length:,} tokens: {summary.median:.1f} ms", flush=True)
    return records


def quiet_rounds(runs: Sequence[DecodeRun], rounds: int) -> list[list[list[float]]]:
    """Return the seconds of each step by round and run, of quiet rounds alone."""
    quiet: list[list[list[float]]] = []
    for run in runs:
        time_block(run)  # the first steps load graphs
    for _ in range(TRIES * rounds):
        others = Others()
        blocks = [time_block(run) for run in runs]
        if (share := others.share()) <= BUSY:
            quiet.append(blocks)
        print(f"round {len(quiet)} of {rounds}, others {share:.0%}", flush=True)
        if len(quiet) == rounds:
            return quiet
    raise SystemExit(f"error: {len(quiet)} rounds of {TRIES * rounds} were quiet, expected {rounds}: end other work")


if __name__ == "__main__":
    main()
