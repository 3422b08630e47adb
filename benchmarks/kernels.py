"""Speed of the CUDA kernels on a GPU, beside their floor and beside dense attention by others.

    python -m benchmarks.kernels                              # the whole sweep: a few minutes on an H200
    python -m benchmarks.kernels --batches 1 --contexts 32768 --budgets 512 --operations hybrid dense
    KVC_TRT_KERNELS=$PWD/build/libkvc_kernels.so python -m benchmarks.kernels

One layer of Llama-3.1-8B in bf16 under RocketKV; every constant comes from kvc_trt.policies. Calls run in a CUDA graph
from a cold L2 cache (gpu_timing.py); bytes and floors are formulas (kernel_traffic.py), the floor by this GPU's own
copy bandwidth. What does not fit the GPU's memory, and what the GPU throttled, is listed as not measured, with the
reason. The result goes to benchmarks/results/kernels.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch

from benchmarks import machine
from benchmarks.kernel_cases import ITEM_BYTES, OPERATIONS, Case, tensor_bytes
from benchmarks.kernel_traffic import Traffic, call_traffic
from kvc_trt.errors import KvcError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.loading import VARIABLE, current_library
from kvc_trt.profile.floor import H200

BATCHES = (1, 8, 32)
CONTEXTS = (16384, 32768, 65536, 131072)
BUDGETS = (256, 512, 1024, 2048)
NEEDS_BUDGET = ("compact", "hybrid")
BASELINES = ("sdpa_flash", "flashinfer")
CANNOT = 3


@dataclass(frozen=True)
class Point:
    """One thing to measure."""

    name: str
    case: Case

    @property
    def operation(self) -> str:
        """Whose traffic counts: a baseline does what `dense` does."""
        return self.name if self.name in OPERATIONS else "dense"

    @property
    def label(self) -> str:
        budget = f" budget {self.case.budget}" if self.name in NEEDS_BUDGET else ""
        return f"{self.name} batch {self.case.batch} context {self.case.context}{budget}"


def points(options: argparse.Namespace) -> Iterator[Point]:
    """The sweep in the order in which it is measured; what does not depend on the budget is measured once."""
    for batch, context in itertools.product(options.batches, options.contexts):
        for name in options.operations + options.baselines:
            budgets = options.budgets if name in NEEDS_BUDGET else options.budgets[:1]
            for budget in budgets:
                yield Point(name, Case(batch, context, budget, options.dtype))


def figures(traffic: Traffic, median_us: float, bandwidth: float) -> dict[str, float]:
    """A time beside what it had to move: achieved bandwidth, floor, and the share of the floor that was reached."""
    floor = traffic.floor_microseconds(bandwidth, H200.flops_16bit)
    return {
        "bytes": traffic.bytes,
        "gigabytes_per_second": traffic.bytes / median_us * 1e-3,
        "share_of_copy_bandwidth": traffic.bytes / median_us * 1e6 / bandwidth,
        "floor_us": floor,
        "share_of_floor": floor / median_us,
    }


def memory_needed(point: Point, sets: int) -> int:
    """Bytes of all sets of tensors; building the bounds of a set takes as much again as its keys and values."""
    return (sets + 1) * tensor_bytes(point.operation, point.case) * (2 if point.name == "hybrid" else 1)


def measured(point: Point, library: KernelLibrary, bandwidth: float, options: argparse.Namespace) -> dict[str, Any]:
    """One entry of the result: figures, or the reason why there are none."""
    from benchmarks import gpu_timing, kernel_calls

    entry: dict[str, Any] = {"name": point.name, "batch": point.case.batch, "context": point.case.context}
    if point.name in NEEDS_BUDGET:
        entry["budget"] = point.case.budget
    if reason := kernel_calls.unavailable(point.name):
        return {**entry, "not_measured": reason}
    traffic = call_traffic(point.operation, point.case)
    sets = gpu_timing.sets_needed(traffic.bytes, torch.cuda.get_device_properties(0).L2_cache_size)
    free, wanted = torch.cuda.mem_get_info()[0], memory_needed(point, sets)
    if wanted > free:
        return {**entry, "not_measured": f"needs {wanted >> 20} MiB of GPU memory, {free >> 20} MiB are free"}
    calls = {**kernel_calls.KERNELS, **kernel_calls.BASELINES}[point.name](library, point.case, sets)
    try:
        timing = gpu_timing.measure(calls, options.samples)
        kernels = gpu_timing.kernel_times(calls) if options.kernel_times else {}
    except gpu_timing.Throttled as error:
        return {**entry, "not_measured": f"the GPU was throttled: {error}"}
    except RuntimeError as error:
        # A baseline that this GPU or version lacks must not end the sweep; a failure of our own kernels must.
        if point.name not in BASELINES:
            raise
        return {**entry, "not_measured": str(error).splitlines()[0]}
    return {**entry, **asdict(timing), **figures(traffic, timing.median_us, bandwidth), "kernels_us": kernels}


def sweep(library: KernelLibrary, options: argparse.Namespace) -> dict[str, Any]:
    """The whole result."""
    from benchmarks import gpu_timing

    torch.cuda.init()
    bandwidth = gpu_timing.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies {bandwidth / 1e9:.0f} GB/s")
    results = []
    for point in points(options):
        entry = measured(point, library, bandwidth, options)
        results.append(entry)
        torch.cuda.empty_cache()
        print(f"{point.label}: {_line(entry)}", flush=True)
    return {
        "device": gpu_timing.device_record(),
        "copy_bytes_per_second": bandwidth,
        "dtype": options.dtype,
        "l2": "cold",
        "cuda_graph": True,
        "results": results,
    }


def _line(entry: dict[str, Any]) -> str:
    if "not_measured" in entry:
        return f"not measured: {entry['not_measured']}"
    return (
        f"{entry['median_us']:.1f} us (spread {entry['spread']:.1%}), {entry['gigabytes_per_second']:.0f} GB/s, "
        f"{entry['share_of_floor']:.0%} of its floor {entry['floor_us']:.1f} us"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=_count, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=_count, nargs="+", default=list(CONTEXTS), help="prompt and answer together")
    parser.add_argument("--budgets", type=_count, nargs="+", default=list(BUDGETS))
    parser.add_argument("--operations", nargs="*", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--dtype", choices=[name for name in ITEM_BYTES if name != "float32"], default="bfloat16")
    parser.add_argument("--samples", type=_count, default=30, help="replays of each graph")
    parser.add_argument("--kernel-times", action=argparse.BooleanOptionalAction, default=True,
                        help="also the time of every kernel, by torch's profiler")  # fmt: skip
    parser.add_argument("--output", default="kernels", help="benchmarks/results/OUTPUT.json")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def cuda_library() -> KernelLibrary:
    """The library for this GPU; a SystemExit that says what is missing where there is none."""
    if not torch.cuda.is_available():
        _cannot("no GPU: the kernels were not run and nothing was timed")
    try:
        library = current_library()
    except KvcError as error:
        _cannot(str(error))
    if library is None or library.executor != "cuda":
        found = "no kernel library" if library is None else f"{library.path} is the emulation"
        _cannot(f"{found}; `make plugins`, then {VARIABLE}=$PWD/build/libkvc_kernels.so")
    return library


def _cannot(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(CANNOT)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    library = cuda_library()
    path = machine.write_result(options.output, sweep(library, options))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
