"""Time of one kernel call on a GPU: inside a CUDA graph, from a cold L2 cache, and not while the clocks are held down.

A graph holds one call on each of several equal sets of tensors, together larger than the L2 cache several times over,
so that every call finds its inputs in memory only. The time of a call is the graph's time over the number of sets.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvc_trt.profile.statistics import percentile

Call = Callable[[], object]
COLD = 8
"""The sets together touch this many times the L2 cache: little of a set survives until its next turn."""
LARGEST_SETS = 256
SAMPLES = 30
ATTEMPTS = 3
COPY_BYTES = 1 << 30
READ_BYTES = 1 << 32
# NVML's clocks event reasons that make a timing worthless: hardware and thermal slowdowns, the power brake.
THROTTLED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
POWER_CAP = 0x4


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median_us: float
    spread: float
    """Interquartile range over the median."""
    samples: int
    sets: int
    clocks: str
    """The driver's statement about the clocks: "free", "power cap", or "unknown"."""


class Throttled(Exception):
    """The GPU was slowed down in every attempt."""


def sets_needed(touched_bytes: int, l2_bytes: int) -> int:
    """Sets of tensors that keep a call's inputs out of the L2 cache."""
    return min(LARGEST_SETS, max(1, -(-COLD * l2_bytes // touched_bytes)))


def judge_clocks(reasons: int | None) -> str:
    """Return a word for NVML's bit mask; raises Throttled where a timing would say nothing about the kernel."""
    if reasons is None:
        return "unknown"
    held = [name for bit, name in THROTTLED.items() if reasons & bit]
    if held:
        raise Throttled(", ".join(held))
    return "power cap" if reasons & POWER_CAP else "free"


def clock_reasons() -> int | None:
    """NVML's bit mask of what limits the clocks now; None where nvidia-smi cannot tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    for field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", f"--id={_pci_address()}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip().startswith("0x"):
            return int(done.stdout.strip(), 16)
    return None


def _pci_address() -> str:
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def measure(calls: Sequence[Call], samples: int = SAMPLES) -> Timing:
    """Time per call of a graph that makes all of them, one after the other. Raises Throttled."""
    graph = _captured(calls)
    for attempt in range(ATTEMPTS):
        times = _replay(graph, samples)
        try:
            clocks = judge_clocks(clock_reasons())
        except Throttled:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(5)
            continue
        micros = [1e3 * milliseconds / len(calls) for milliseconds in times]
        median = percentile(micros, 50)
        spread = (percentile(micros, 75) - percentile(micros, 25)) / median
        return Timing(median, spread, samples, len(calls), clocks)
    raise AssertionError("unreachable: the last attempt returns or raises")


def measure_between(calls: Sequence[Call], other: Call, samples: int = SAMPLES) -> Timing:
    """Time per call where another one, `other`, comes before each: the time of `other` alone is subtracted.

    Calls one after the other find their instructions in the caches; in a step, each layer has other kernels between.
    """
    both = measure([one for call in calls for one in (other, call)], samples)
    alone = measure([other] * len(calls), samples)
    return replace(both, median_us=2 * both.median_us - alone.median_us)


def kernel_times(calls: Sequence[Call]) -> dict[str, float]:
    """Mean microseconds of each kernel in one call, by CUPTI through torch's profiler, in the order of their time.

    Of a kernel that begins early the time contains its wait for the one before: switch that off first.
    """
    graph = _captured(calls)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in profile.key_averages():
        if event.device_time_total > 0:
            totals[event.key] = event.device_time_total / len(calls)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def copy_bandwidth() -> float:
    """Return the bytes per second of a device-to-device copy of a gigabyte, read and written together."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    source.random_()
    timing = measure([lambda: target.copy_(source)])
    return 2 * COPY_BYTES / (timing.median_us * 1e-6)


def read_bandwidth() -> float:
    """Return the bytes per second of a sum over four gigabytes, which reads and hardly writes."""
    source = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device="cuda")
    result = torch.zeros((), dtype=torch.float32, device="cuda")
    timing = measure([lambda: torch.sum(source, dim=0, out=result)])
    return READ_BYTES / (timing.median_us * 1e-6)


def device_record() -> dict[str, Any]:
    """Return the GPU, as a result names it."""
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={_pci_address()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()  # loads modules and tunes kernels, which a capture may not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, samples: int) -> list[float]:
    """Milliseconds of each replay, after three that are not counted."""
    for _ in range(3):
        graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]
