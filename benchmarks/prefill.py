"""Prefill of one engine on each backend for CPUs, in turns, so that a busy moment falls on all of them.

    python -m benchmarks.prefill ENGINE                                  # 4,096 tokens, two threads
    python -m benchmarks.prefill ENGINE --tokens 16384 --repeats 5 --write

Wall time is what a user waits; CPU time over the number of threads is what remains of it on a machine that does nothing
else, and varies less where others work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import machine
from kvc_trt.backends import registry
from kvc_trt.backends.prefill_precision import PREFILL_PRECISIONS, PrefillPrecision
from kvc_trt.engine.program import engine_program
from kvc_trt.profile.profiled_engine import random_prompts

CANDIDATES = ("onnxruntime", "openvino")
WARM_UP = 256
"""Tokens of a first prompt, which is not counted: libraries pack weights when they first run."""


def measure(path: str, tokens: int, threads: int, repeats: int, precision: PrefillPrecision = "f32") -> dict[str, Any]:
    engine = registry.open_engine(path)
    prompts = random_prompts(1, tokens, engine.model.vocab_size)
    executors = {}
    for name in CANDIDATES:
        if name in registry.runners(engine.backend) and registry.backend(name).probe().usable:
            executors[name] = registry.backend(name).with_prefill(precision).open(engine, threads=threads)
            executors[name].prefill(prompts[:, :WARM_UP], np.array([WARM_UP]))
    wall: dict[str, list[float]] = {name: [] for name in executors}
    processor: dict[str, list[float]] = {name: [] for name in executors}
    for _ in range(repeats):
        for name, executor in executors.items():
            started, used = time.perf_counter(), time.process_time()
            executor.prefill(prompts, np.array([tokens]))
            wall[name].append(time.perf_counter() - started)
            processor[name].append((time.process_time() - used) / threads)
    return {
        "engine": str(engine.path),
        "weights": engine_program(engine).weight_format,
        "policy": engine.parameters.policy,
        "tokens": tokens,
        "threads": threads,
        "prefill_precision": precision,
        "backends": {
            name: {
                "wall_s": wall[name],
                "median_wall_s": statistics.median(wall[name]),
                "cpu_s_per_thread": processor[name],
                "median_cpu_s_per_thread": statistics.median(processor[name]),
            }
            for name in executors
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill-precision", choices=PREFILL_PRECISIONS, default="f32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/prefill.json")
    arguments = parser.parse_args()
    result = measure(
        arguments.engine, arguments.tokens, arguments.threads, arguments.repeats, arguments.prefill_precision
    )
    for name, found in result["backends"].items():
        print(f"{name:12} {found['median_wall_s']:8.2f} s, CPU {found['median_cpu_s_per_thread']:.2f} s per thread")
    if arguments.write:
        print(machine.write_result("prefill", result))


if __name__ == "__main__":
    main()
