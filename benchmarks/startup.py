"""The time that the command line takes to answer `--help` and `plan`: medians over fresh processes.

    python -m benchmarks.startup

The bars: `--help` under 0.3 s, `plan` under 1 s, also for models of 2026 as published, of which no weights are read.
They are compared with seconds of the processor, which other work on the machine lengthens less than those of the clock;
the result has both, and the machine's load. Modules are compiled once, as those of an installed package are.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from benchmarks import store

PLAN = ["plan", "--model", "llama3.1-8b", "--policy", "rocketkv", "--token-budget", "512", "--max-input-len", "131072"]
PUBLISHED = ("gemma-3-12b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-9b", "command-r-08-2024")
COMMANDS: Mapping[str, tuple[list[str], float]] = {
    "help": (["--help"], 0.3),
    "plan": (PLAN, 1.0),
    **{f"plan {model}": (["plan", "--model", model], 1.0) for model in PUBLISHED},
}


class Seconds(NamedTuple):
    """Of one process, by the clock and of the processor."""

    clock: float
    processor: float


def seconds_of(arguments: list[str], compiled: str) -> Seconds:
    """Run the command line in a process of its own, with compiled modules in the folder `compiled`."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "kvc_trt", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120, env=environment)
    clock, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measured(arguments: list[str], bar: float, repeats: int, compiled: str) -> dict[str, Any]:
    seconds_of(arguments, compiled)  # fills the file cache and the folder
    samples = [seconds_of(arguments, compiled) for _ in range(repeats)]
    processor = median(one.processor for one in samples)
    return {
        "clock_s": median(one.clock for one in samples),
        "processor_s": processor,
        "processor_min_s": min(one.processor for one in samples),
        "processor_max_s": max(one.processor for one in samples),
        "runs": repeats,
        "bar_s": bar,
        "within_bar": processor < bar,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    results, load_before = {}, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as compiled:
        for name, (arguments, bar) in COMMANDS.items():
            found = results[name] = measured(arguments, bar, repeats, compiled)
            print(f"{name}: {found['processor_s']:.3f} s of the processor, {found['clock_s']:.3f} s (bar {bar} s)")
    load = [load_before, os.getloadavg()[0]]
    print(store.write_result("startup", {"load_average_before_and_after": load, "startup": results}))


if __name__ == "__main__":
    main()
