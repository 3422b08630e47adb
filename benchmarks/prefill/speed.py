"""Prefill of engines on each backend for CPUs, in turns, so that a busy moment falls on all of them.

    python -m benchmarks.prefill.speed ENGINE                                  # 4,096 tokens, two threads
    python -m benchmarks.prefill.speed ENGINE ENGINE --precisions f32 bf16 --repeats 5 --write

Wall time is the user's wait; CPU time over the number of threads is the wall time on a machine that does nothing else,
and varies less where others work. Beside both, the operators that ONNX Runtime spends its time in: recording them costs
time, so only their shares count.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import store
from kvc_trt.backends import registry
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.operator_times import operator_times
from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.run_options import PREFILL_PRECISIONS, RunOptions
from kvc_trt.engine.program import engine_program
from kvc_trt.profile.profiled_engine import random_prompts

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

CANDIDATES = ("onnxruntime", "openvino")
WARM_UP = 256
"""Tokens of a first prompt, which is not counted: libraries pack weights when they first run."""
LEAST_SHARE = 0.01
"""Operators that take less of a prefill are not listed."""


def measure(path: str, tokens: int, repeats: int, options: RunOptions) -> dict[str, Any]:
    """Return wall and CPU seconds of every run on every backend that can run the engine, and operators' shares."""
    engine = open_engine(path)
    prompts, lengths = random_prompts(1, tokens, engine.model.vocab_size), np.array([tokens])
    executors = {}
    for name in CANDIDATES:
        if name in registry.runners(engine.backend) and registry.backend(name).probe().usable:
            registry.backend(name).check_options(options)
            executors[name] = registry.backend(name).open(engine, options)
            executors[name].prefill(prompts[:, :WARM_UP], np.array([WARM_UP]))
    wall: dict[str, list[float]] = {name: [] for name in executors}
    processor: dict[str, list[float]] = {name: [] for name in executors}
    for _ in range(repeats):
        for name, executor in executors.items():
            started, used = time.perf_counter(), time.process_time()
            executor.prefill(prompts, lengths)
            wall[name].append(time.perf_counter() - started)
            processor[name].append((time.process_time() - used) / (options.threads or 1))
    return {
        "engine": engine.path.name,
        "weights": engine_program(engine).weight_format,
        "policy": engine.parameters.policy,
        "tokens": tokens,
        "threads": options.threads,
        "prefill_precision": options.prefill_precision,
        "backends": {
            name: {
                "wall_s": wall[name],
                "median_wall_s": statistics.median(wall[name]),
                "cpu_s_per_thread": processor[name],
                "median_cpu_s_per_thread": statistics.median(processor[name]),
            }
            for name in executors
        },
        "operator_shares": operator_shares(engine, tokens, options),
    }


def operator_shares(engine: EngineDirectory, tokens: int, options: RunOptions) -> dict[str, float]:
    """Return the share of a prefill that each operator takes on ONNX Runtime, largest first."""
    prompts = random_prompts(1, tokens, engine.model.vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        executor = OnnxRuntimeExecutor(engine_program(engine), options, profile=Path(directory))
        for _ in range(3):  # the first one is not counted
            executor.prefill(prompts, np.array([tokens]))
        times = operator_times(executor.end_profiling()["prefill"])
    whole = sum(one.seconds for one in times)
    return {one.name: one.seconds / whole for one in times if one.seconds >= LEAST_SHARE * whole}


def show(result: dict[str, Any]) -> Iterable[str]:
    """Yield the lines that say one result."""
    yield f"{result['engine']}, {result['tokens']:,} tokens, {result['prefill_precision']}"
    for name, found in result["backends"].items():
        yield f"  {name:12} {found['median_wall_s']:8.2f} s, CPU {found['median_cpu_s_per_thread']:.2f} s per thread"
    yield "  " + ", ".join(f"{name} {share:.1%}" for name, share in result["operator_shares"].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", metavar="ENGINE")
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precisions", nargs="+", choices=PREFILL_PRECISIONS, default=["f32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/prefill.json")
    arguments = parser.parse_args()
    results = []
    for path in arguments.engines:
        for precision in arguments.precisions:
            options = RunOptions(threads=arguments.threads, prefill_precision=precision)
            results.append(measure(path, arguments.tokens, arguments.repeats, options))
            print("\n".join(show(results[-1])), flush=True)
    if arguments.write:
        print(store.write_result("prefill", {"engines": results}))


if __name__ == "__main__":
    main()
