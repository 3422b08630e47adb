"""The time that the command line takes to answer `--help` and `plan`: medians over fresh processes.

    python -m benchmarks.startup

The bars: `--help` under 0.3 s, `plan` under 1 s. Nothing heavy is imported by either.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

from benchmarks import store

PLAN = ["plan", "--model", "llama3.1-8b", "--policy", "rocketkv", "--token-budget", "512", "--max-input-len", "131072"]
COMMANDS = {"help": (["--help"], 0.3), "plan": (PLAN, 1.0)}


def seconds_of(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvc_trt", *arguments], check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    results = {}
    for name, (arguments, bar) in COMMANDS.items():
        seconds_of(arguments)  # fills the file cache
        samples = [seconds_of(arguments) for _ in range(repeats)]
        results[name] = {
            "median_s": median(samples),
            "min_s": min(samples),
            "max_s": max(samples),
            "runs": repeats,
            "bar_s": bar,
            "within_bar": median(samples) < bar,
        }
        print(f"{name}: {results[name]['median_s']:.3f} s (bar {bar} s)")
    print(store.write_result("startup", {"startup": results}))


if __name__ == "__main__":
    main()
