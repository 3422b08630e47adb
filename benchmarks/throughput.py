"""Many requests at once on a real chat model: what `kvc-trt profile --requests` says, beside the dense twin.

    python -m benchmarks.throughput [--checkpoint FILE.gguf]

Runs the two commands of BUILD and PROFILE, as a user would: the preset's own policy and budget, and a load of long
prompts and short answers. Some five minutes; again, up to TRIES times, where other work took more than BUSY of the
processors. Writes benchmarks/results/throughput.json and the measured part of docs/profile.md (`--page`: only the
page).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.accuracy.smollm2.grid import MODEL
from benchmarks.machine import ROOT
from benchmarks.page import Marks, bullet, measured_by, paragraph, table
from benchmarks.peers.idle import Others
from benchmarks.peers.rounds import BUSY

NAME = "throughput"
COMMAND = "python -m benchmarks.throughput"
PAGE = ROOT / "docs" / "profile.md"
MARKS = Marks.of("throughput.py")
ENGINE = "smollm2"
BUILD = f"kvc-trt build --model {MODEL} --max-input-len 2048 --max-output-len 256 -o {ENGINE} --no-verify"
PROFILE = f"kvc-trt profile {ENGINE} --requests 16 --concurrency 8 --input-len 1024:2048 --output-len normal:128,32"
MIB = 1 << 20
TRIES = 3


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
        for _ in range(TRIES):
            others = Others()
            found = json.loads(_run([*shlex.split(PROFILE), "--json"], directory))
            if (share := others.share()) <= BUSY:
                break
            print(f"other work took {share:.0%} of the processors", flush=True)
    kept = ("engine", "request_info", "rows", "runs", "findings")
    return {"commands": [BUILD, PROFILE], "others_share": share, **{name: found[name] for name in kept}}


def _run(command: list[str], directory: str) -> bytes:
    module = [sys.executable, "-m", "kvc_trt", *command[1:]]
    return subprocess.run(module, cwd=directory, check=True, stdout=subprocess.PIPE).stdout


def measured(result: Mapping[str, Any]) -> str:
    """The part of the page between the marks."""
    commands = "\n".join(f"    {one}" for one in result["commands"])
    lines = table(
        ["", "rows", "MiB of all rows", "requests/s", "output tokens/s", "first token p50, p90, p99, s",
         "per output token p50, p90, p99, ms", "end to end p50, s"],
        [_line(row) for row in result["rows"]],
    )  # fmt: skip
    runs = result["request_info"]["repeats"]
    how = (
        f"Medians of {runs} runs of each side, in turns. {measured_by(COMMAND, result['machine'])}; other work took "
        f"{result['others_share']:.0%} of the machine."
    )
    return "\n\n".join([commands, lines, "\n".join(_findings(result)), paragraph(how)])


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


def _findings(result: Mapping[str, Any]) -> Iterator[str]:
    for one in result["findings"]:
        yield bullet(f"{one[0].upper()}{one[1:]}.")


if __name__ == "__main__":
    main()
