"""Hardware counters of every kernel of a decode step (page scores, selection, attention), by NVIDIA's Nsight Compute.

    python -m benchmarks.kernels.counters
    python -m benchmarks.kernels.counters --points rocketkv/8/32768/1024

Each point is a process of its own under `ncu`, where that is found: one step of one layer, its kernels one by one from
a cold cache, the clocks as they are. Under ncu kernels do not overlap, so these times are no latencies of a step
(`benchmarks.kernels` has those); what is counted is exact. The result goes to benchmarks/results/counters.json, point
by point.
"""

from __future__ import annotations

import argparse
import csv
import glob
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.choice import add_argument, chosen
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.points import Point, Results, add_arguments
from benchmarks.kernels import calls as kernel_calls
from benchmarks.kernels.cases import Case
from benchmarks.kernels.sweep import POINTS, SweepPoint, point
from kvc_trt.methods.base.parameters import DEFAULT

STEPS = (
    SweepPoint(DEFAULT, 1, 32768, 512), SweepPoint(DEFAULT, 8, 32768, 1024), SweepPoint(DEFAULT, 32, 32768, 2048),
    *POINTS,
)  # fmt: skip
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
    "smsp__inst_executed.sum": "warp_instructions",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent_of_peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessor_percent_of_peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "active_warps_percent",
    "launch__registers_per_thread": "registers_per_thread",
}
"""Nsight Compute's name, in its base units -> the name in a result."""


def ncu() -> str | None:
    """Nsight Compute's command, where it is installed."""
    places = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
    found = (path for place in places for path in sorted(glob.glob(place), reverse=True))
    return shutil.which("ncu") or next(found, None)


def command(tool: str, log: Path, step: SweepPoint) -> list[str]:
    """Return the command that counts one step in its own process, from `start` to `stop` of `run_step`."""
    return [
        tool, "--csv", "--log-file", str(log), "--print-units", "base", "--metrics", ",".join(METRICS),
        "--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all",
        sys.executable, "-m", "benchmarks.kernels.counters", "--step", str(step),
    ]  # fmt: skip


def read(log: str) -> list[dict[str, Any]]:
    """Return the kernels of a log in the order of their launches, each with its counters."""
    rows = itertools.dropwhile(lambda text: not text.startswith('"ID"'), log.splitlines())
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(rows):
        kernel = kernels.setdefault(
            row["ID"], {"kernel": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"]}
        )
        if row["Metric Name"] in METRICS:
            kernel[METRICS[row["Metric Name"]]] = float(row["Metric Value"].replace(",", ""))
    return list(kernels.values())


def problem(log: str, otherwise: str) -> str:
    """Return the reason why there are no counters: ncu's own words if it has any, else `otherwise`."""
    return next((text for text in log.splitlines() if text.startswith("==ERROR==")), otherwise)


def counted(step: SweepPoint, seconds: float) -> dict[str, Any]:
    """Counters of one step's kernels, or the reason why there are none."""
    tool = ncu()
    if tool is None:
        return {"not_measured": "ncu (Nsight Compute) is not installed; it is part of the CUDA toolkit"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        done = subprocess.run(
            command(tool, log, step),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
        said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    kernels = read(said)
    if not kernels:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing was profiled").splitlines()[-1]
        return {"not_measured": problem(said + done.stdout, f"ncu ended with {done.returncode}: {last}")}
    return {"kernels": kernels}


def run_step(step: SweepPoint, gpu: Gpu) -> None:
    """One step twice: the first loads modules, the second is what ncu counts."""
    case = Case(step.batch, step.context, step.budget, policy=step.policy)
    (call,) = kernel_calls.hybrid(gpu.library, case, 1)
    call()
    gpu.synchronize()
    if not gpu.emulated:
        torch.cuda.cudart().cudaProfilerStart()
    call()
    gpu.synchronize()
    if not gpu.emulated:
        torch.cuda.cudart().cudaProfilerStop()


def measured(step: SweepPoint, gpu: Gpu, seconds: float) -> Mapping[str, Any]:
    """One entry of the result."""
    if gpu.emulated:
        run_step(step, gpu)
        return gpu.publishable({})
    return counted(step, seconds)


def points(gpu: Gpu, options: argparse.Namespace) -> Iterator[Point]:
    """Yield every step to be counted."""
    for step in options.points:
        identity = {"name": step.policy, "batch": step.batch, "context": step.context, "budget": step.budget}
        yield identity, partial(measured, step, gpu, options.point_seconds - 5)


def line(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{one['kernel']} {one.get('nanoseconds', 0) / 1e3:.1f} us under ncu" for one in entry["kernels"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=point, nargs="+", default=list(STEPS), metavar="POLICY/BATCH/CONTEXT/BUDGET")
    parser.add_argument("--step", type=point, help="run this step once, without counting: what ncu is given")
    parser.add_argument("--output", default="counters", help="benchmarks/results/OUTPUT.json")
    add_argument(parser)
    add_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    gpu = chosen(options)
    if options.step is not None:
        run_step(options.step, gpu)
        return 0
    head = {"device": gpu.record(), "dtype": "bfloat16", "l2": "cold"}
    results = Results(options.output, head, gpu, resume=options.resume, seconds=options.point_seconds)
    results.measure("points", points(gpu, options), line)
    print(results.path)
    return results.status


if __name__ == "__main__":
    sys.exit(main())
