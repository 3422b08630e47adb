"""Many requests at once on a real chat model: the figures of `kvc-trt profile --requests`, beside the dense twin.

    python -m benchmarks.throughput [--checkpoint FILE.gguf]

Runs the two commands of BUILD and PROFILE, as a user would: the preset's own policy and budget, and a load of long
prompts and short answers. PROFILE is run until ROUNDS of its runs were quiet: others took at most BUSY of the
processors. After TRIES runs the quietest count, and the page says how busy they were. Five minutes of a quiet machine.
Writes benchmarks/results/throughput.json and the measured part of docs/profile.md (`--page`: only the page).
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.accuracy.smollm2.grid import MODEL
from benchmarks.idle import Others
from benchmarks.machine import ROOT
from benchmarks.page import Marks, measured_by, paragraph, table
from benchmarks.peers.rounds import BUSY
from kvc_trt.profile.requests.figures import over_repeats

NAME = "throughput"
COMMAND = "python -m benchmarks.throughput"
PAGE = ROOT / "docs" / "profile.md"
MARKS = Marks.of("throughput.py")
ENGINE = "smollm2"
BUILD = (
    f"kvc-trt build --model {MODEL} --weights fp32 --max-input-len 2048 --max-output-len 256 -o {ENGINE} --no-verify"
)
LOAD = "--requests 8 --concurrency 8 --input-len 1024:2048 --output-len normal:128,32"
PROFILE = f"kvc-trt profile {ENGINE} {LOAD} --repeats 1"
SIDE = ("side", "rows", "row_bytes", "cache_bytes", "allocated_bytes")
MIB = 1 << 20
ROUNDS, TRIES = 3, 6


def main() -> None:
    """Measure, and write the result and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--page", action="store_true", help="write the page of the committed result")
    given = parser.parse_args()
    if not given.page:
        print(store.write_result(NAME, measure(given.checkpoint)))
    MARKS.replace(PAGE, measured(store.recorded(NAME, COMMAND)))
    print(PAGE)


def measure(checkpoint: str | None) -> dict[str, Any]:
    """Build the engine, and answer the load with it and its twin."""
    more = [] if checkpoint is None else ["--checkpoint", str(Path(checkpoint).resolve())]
    with tempfile.TemporaryDirectory() as directory:
        _run([*shlex.split(BUILD), *more], directory)
        rounds = _rounds(directory)
    first = rounds[0]
    runs = [{**run, "repeat": place} for place, one in enumerate(rounds) for run in one["runs"]]
    rows = [
        {**{name: row[name] for name in SIDE}, **over_repeats([run for run in runs if run["side"] == row["side"]])}
        for row in first["rows"]
    ]
    return {
        "commands": [BUILD, PROFILE],
        "others_share": [one["others_share"] for one in rounds],
        "engine": first["engine"],
        "request_info": first["request_info"],
        "rows": rows,
        "runs": runs,
    }


def _rounds(directory: str) -> list[dict[str, Any]]:
    """Return ROUNDS results of PROFILE with the processors' share of other work, the quietest of all that were made."""
    found: list[dict[str, Any]] = []
    for _ in range(TRIES):
        others = Others()
        result = json.loads(_run([*shlex.split(PROFILE), "--json"], directory))
        found.append({**result, "others_share": others.share()})
        print(f"others took {found[-1]['others_share']:.0%}", flush=True)
        if sum(one["others_share"] <= BUSY for one in found) == ROUNDS:
            break
    return sorted(found, key=lambda one: float(one["others_share"]))[:ROUNDS]


def _run(command: list[str], directory: str) -> bytes:
    module = [sys.executable, "-m", "kvc_trt", *command[1:]]
    return subprocess.run(module, cwd=directory, check=True, stdout=subprocess.PIPE).stdout


def measured(result: Mapping[str, Any]) -> str:
    """Return the part of the page between the marks."""
    commands = "\n".join(f"    {one}" for one in result["commands"])
    lines = table(
        ["", "rows", "MiB of all rows", "requests/s", "output tokens/s", "first token p50, p90, p99, s",
         "per output token p50, p90, p99, ms", "end to end p50, s"],
        [_line(row) for row in result["rows"]],
    )  # fmt: skip
    how = (
        f"Medians of {len(result['others_share'])} runs of the second command; other work took at most "
        f"{max(result['others_share']):.0%} of the processors. {measured_by(COMMAND, result['machine'])}."
    )
    return "\n\n".join([commands, lines, paragraph(_ratio(result)), paragraph(how)])


def _ratio(result: Mapping[str, Any]) -> str:
    engine, dense = result["rows"]
    by_side = {
        row["side"]: [run["request_throughput"] for run in result["runs"] if run["side"] == row["side"]]
        for row in (engine, dense)
    }
    ratios = [own / other for own, other in zip(by_side["engine"], by_side["dense"], strict=True)]
    low, high = min(ratios), max(ratios)
    info = result["request_info"]
    unsure = ": the two cannot be told apart" if low <= 1 <= high else ""
    more = f"{statistics.median(ratios):.2f} times as many requests per second ({low:.2f} to {high:.2f})"
    return (
        f"{info['num_prompts']} requests at once, prompts of up to {info['longest_input_len']:,} random tokens, "
        f"answers of up to {info['longest_output_len']:,}, {info['mean_tokens']:,.0f} tokens together in the mean. In "
        f"the memory of {engine['rows']} rows the twin has {dense['rows']}. The engine answers {more}{unsure}."
    )


def _line(row: Mapping[str, Any]) -> list[str]:
    def percentiles(kind: str, scale: float, digits: int) -> str:
        return ", ".join(f"{scale * row[f'{which}_{kind}_ms']:.{digits}f}" for which in ("p50", "p90", "p99"))

    return [
        row["side"],
        str(row["rows"]),
        f"{row['cache_bytes'] / MIB:.0f}",
        f"{row['request_throughput']:.3f}",
        f"{row['output_throughput']:.1f}",
        percentiles("ttft", 1e-3, 1),
        percentiles("tpot", 1, 0),
        f"{row['p50_e2el_ms'] / 1e3:.1f}",
    ]


if __name__ == "__main__":
    main()
