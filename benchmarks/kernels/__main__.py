"""Speed of the CUDA kernels on a GPU, beside their floor and beside dense attention by others.

    python -m benchmarks.kernels                              # the whole sweep: a few minutes on an H200
    python -m benchmarks.kernels --batches 1 --contexts 32768 --budgets 512 --operations hybrid dense
    KVC_TRT_KERNELS=$PWD/build/libkvc_kernels.so python -m benchmarks.kernels

One layer of Llama-3.1-8B in bf16 under RocketKV, and the step alone at `--points` under any policy, over caches in a
format dense attention too; every constant comes from kvc_trt.policies. Calls run in a CUDA graph from a cold L2 cache
(gpu/timing.py); bytes and floors are formulas (traffic.py), the floor by the bandwidth that this GPU's memory reaches:
of a copy for compaction, of reading for steps. A step is also timed between the products of a layer, which leave the
instruction caches cold, and without each feature that a switch turns off. Points that do not fit the GPU's memory, and
points that the GPU throttled, are listed as not measured, with the reason, and failed ones as failed; the exit status
is then 1. The result goes to benchmarks/results/kernels.json, point by point (points.py).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu.choice import add_argument, chosen
from benchmarks.gpu.device import Bandwidths, Gpu
from benchmarks.gpu.points import Results, add_arguments, first_line
from benchmarks.gpu.timing import Call
from benchmarks.kernels import calls as kernel_calls
from benchmarks.kernels.cases import ITEM_BYTES, OPERATIONS, Case, tensor_bytes
from benchmarks.kernels.sweep import POINTS, count, point
from benchmarks.kernels.traffic import Traffic, call_traffic
from kvc_trt.kernels.switches import EARLY_LAUNCH, SWITCHES
from kvc_trt.profile.accelerators import H200

BATCHES = (1, 8, 32)
CONTEXTS = (16384, 32768, 65536, 131072)
BUDGETS = (256, 512, 1024, 2048)
NEEDS_BUDGET = ("compact", "hybrid")
STEPS = ("hybrid", "dense")
BASELINES = tuple(kernel_calls.BASELINES)


@dataclass(frozen=True)
class Point:
    """One thing to measure."""

    name: str
    case: Case

    @property
    def operation(self) -> str:
        """The operation whose traffic counts; a baseline counts as `dense`."""
        return self.name if self.name in OPERATIONS else "dense"

    @property
    def identity(self) -> dict[str, Any]:
        """Return the fields that distinguish the point's entry from others."""
        found = {"name": self.name, "batch": self.case.batch, "context": self.case.context}
        if self.name in NEEDS_BUDGET or self.case.is_in_format:
            found |= {"budget": self.case.budget, "policy": self.case.policy}
        return found


def points(options: argparse.Namespace) -> Iterator[Point]:
    """Yield the sweep in the order in which it is measured; operations that do not depend on the budget are measured
    once."""
    for batch, context in itertools.product(options.batches, options.contexts):
        for name in options.operations + options.baselines:
            budgets = options.budgets if name in NEEDS_BUDGET else options.budgets[:1]
            for budget in budgets:
                yield Point(name, Case(batch, context, budget, options.dtype))
    for single in options.points:
        case = Case(single.batch, single.context, single.budget, options.dtype, single.policy)
        yield Point("hybrid", case)
        if case.is_in_format:
            yield Point("dense", case)


def figures(point: Point, traffic: Traffic, median_us: float, bandwidths: Bandwidths) -> dict[str, float]:
    """Return a time beside the bytes it moved: achieved bandwidth, floor, and the share of the floor reached."""
    bandwidth = bandwidths.copied if point.operation == "compact" else bandwidths.read
    floor = traffic.floor_microseconds(bandwidth, H200.flops_16bit)
    return {
        "bytes": traffic.bytes,
        "gigabytes_per_second": traffic.bytes / median_us * 1e-3,
        "share_of_bandwidth": traffic.bytes / median_us * 1e6 / bandwidth,
        "floor_us": floor,
        "share_of_floor": floor / median_us,
    }


def memory_needed(point: Point, sets: int) -> int:
    """Return the bytes of all sets of tensors; building the bounds of a set takes as much again as its keys and values.

    Codes are made from fp32: that takes twenty times the memory of the smallest."""
    sets += 20 if point.case.is_in_format else 1
    return sets * tensor_bytes(point.operation, point.case) * (2 if point.name == "hybrid" else 1)


def measured(point: Point, gpu: Gpu, bandwidths: Bandwidths, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return an entry's figures, or the reason why there are none."""
    if reason := kernel_calls.unavailable(point.name):
        return {"not_measured": reason}
    traffic = call_traffic(point.operation, point.case)
    sets = gpu_timing.sets_needed(traffic.bytes, gpu.l2_bytes)
    free, wanted = gpu.free_bytes, memory_needed(point, sets)
    if wanted > free:
        return {"not_measured": f"needs {wanted >> 20} MiB of memory, {free >> 20} MiB are free"}
    try:
        calls = {**kernel_calls.KERNELS, **kernel_calls.BASELINES}[point.name](gpu.library, point.case, sets)
        timing = gpu.measure(calls, options.samples)
        further = {} if point.name in BASELINES else more_times(point, gpu, calls, options)
    except gpu_timing.Throttled as error:
        return {"not_measured": f"the GPU was throttled: {error}"}
    except torch.OutOfMemoryError as error:
        return {"not_measured": first_line(error)}
    except Exception as error:
        # A baseline that this GPU or version lacks is no failure; one of our own kernels is.
        if point.name not in BASELINES:
            raise
        return {"not_measured": first_line(error)}
    return gpu.publishable({**asdict(timing), **figures(point, traffic, timing.median_us, bandwidths), **further})


def more_times(point: Point, gpu: Gpu, calls: Sequence[Call], options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each kernel, of a step between products, and of a step without each feature of the library."""
    found: dict[str, Any] = {}
    if options.kernel_times:
        with EARLY_LAUNCH.off(gpu.library):  # a kernel's time would contain its wait for the one before
            found["kernels_us"] = gpu.kernel_times(calls)
    if point.name in STEPS:
        product = kernel_calls.product(gpu.device, point.case, narrow=gpu.emulated)
        found["between_products_us"] = gpu.measure_between(calls, product, options.samples).median_us
    if point.name in STEPS and options.switches:
        found["without_us"] = {}
        for switch in (one for one in SWITCHES if one.of_library):
            with switch.off(gpu.library):
                found["without_us"][switch.name] = gpu.measure(calls, options.samples).median_us
    return found


def sweep(gpu: Gpu, options: argparse.Namespace) -> Results:
    """Return the whole result, written as it grows."""
    bandwidths = gpu.bandwidths()
    head = {
        "device": gpu.record(),
        **gpu.publishable(bandwidths.figures()),
        "dtype": options.dtype,
        "l2": "cold",
        "cuda_graph": True,
    }
    print(gpu.name)
    results = Results(options.output, head, gpu, resume=options.resume, seconds=options.point_seconds)
    measuring = ((one.identity, partial(measured, one, gpu, bandwidths, options)) for one in points(options))
    results.measure("results", measuring, _line)
    return results


def _line(entry: Mapping[str, Any]) -> str:
    return (
        f"{entry['median_us']:.1f} us (spread {entry['spread']:.1%}), {entry['gigabytes_per_second']:.0f} GB/s, "
        f"{entry['share_of_floor']:.0%} of its floor {entry['floor_us']:.1f} us"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=count, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=count, nargs="+", default=list(CONTEXTS), help="prompt and answer together")
    parser.add_argument("--budgets", type=count, nargs="+", default=list(BUDGETS))
    parser.add_argument("--points", type=point, nargs="*", default=list(POINTS), metavar="POLICY/BATCH/CONTEXT/BUDGET",
                        help="single steps beside those of the lists")  # fmt: skip
    parser.add_argument("--operations", nargs="*", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--dtype", choices=[name for name in ITEM_BYTES if name != "float32"], default="bfloat16")
    parser.add_argument("--samples", type=count, default=30, help="replays of each graph")
    parser.add_argument("--kernel-times", action=argparse.BooleanOptionalAction, default=True,
                        help="also the time of every kernel, by torch's profiler")  # fmt: skip
    parser.add_argument("--switches", action=argparse.BooleanOptionalAction, default=True,
                        help="also steps without each feature that a switch turns off")  # fmt: skip
    parser.add_argument("--output", default="kernels", help="benchmarks/results/OUTPUT.json")
    add_argument(parser)
    add_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    results = sweep(chosen(options), options)
    print(results.path)
    return results.status


if __name__ == "__main__":
    sys.exit(main())
