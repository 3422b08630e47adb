"""A long prompt through the benchmark model: peak memory above the weights, and compaction's share of prefill.

    python -m benchmarks.prefill.memory                 # 32,768 tokens; some minutes on two cores
    python -m benchmarks.prefill.memory --tokens 8192

The bars: 3 GB above the weights, compaction under 10% of prefill. The run is recorded by ONNX Runtime's own profiler,
so one prefill gives all three figures. Resident memory counts the mapped pages of the weight file; they are subtracted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import store
from benchmarks.decode.onnxruntime_steps import MODEL, NEW_TOKENS, TOKEN_BUDGET
from kvc_trt import policies
from kvc_trt.backends.host_memory import watch_memory
from kvc_trt.backends.onnxruntime.benchmark import function_times
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import Program
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.methods.base.registry import prompt_runs
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.profile.profiled_engine import random_prompts

MEMORY_BAR, COMPACTION_BAR = 3e9, 0.10


def program(directory: Path, tokens: int) -> Program:
    parameters = policies.resolve(
        "rocketkv", model=MODEL, token_budget=TOKEN_BUDGET, max_input_len=tokens, max_output_len=NEW_TOKENS
    )
    path = directory / "weights.safetensors"
    write_weights(MODEL, RandomWeights(MODEL, 0), path, weights="fp32", length=parameters.max_sequence_len)
    weights = GraphWeights(path)
    return Program(
        MODEL,
        parameters,
        state_tensors(MODEL, parameters, "float32"),
        HeldFile(path),
        lambda: build_prefill(MODEL, parameters, weights=weights),
        lambda: build_decode(MODEL, parameters, weights=weights),
    )


def measure(tokens: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        built = program(directory, tokens)
        weights = built.weight_file.size
        prompts = random_prompts(1, tokens, MODEL.vocab_size)
        with watch_memory() as peak:
            executor = OnnxRuntimeExecutor(built, RunOptions(threads=threads), profile=directory)
            assert executor.prefill_session is not None
            started = time.perf_counter()
            executor.prefill(prompts, np.array([tokens]))
            seconds = time.perf_counter() - started
        (times,) = function_times(executor.end_profiling()["prefill"], *prompt_runs())
    above = peak.above - weights
    return {
        "tokens": tokens,
        "threads": threads,
        "prefill_s": seconds,
        "prompt_tokens_per_s": tokens / seconds,
        "weights_bytes": weights,
        "peak_above_start_bytes": peak.above,
        "peak_above_weights_bytes": above,
        "memory_bar_bytes": MEMORY_BAR,
        "within_memory_bar": above < MEMORY_BAR,
        "compaction_s": times.part,
        "compaction_share": times.share,
        "compaction_bar": COMPACTION_BAR,
        "within_compaction_bar": times.share < COMPACTION_BAR,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    result = measure(arguments.tokens, arguments.threads)
    print(
        f"{result['tokens']:,} tokens in {result['prefill_s']:.0f} s; "
        f"peak {result['peak_above_weights_bytes'] / 1e9:.2f} GB above the weights (bar 3); "
        f"compaction {result['compaction_share']:.1%} of prefill (bar 10%)"
    )
    suffix = "" if arguments.tokens == 32768 else f"_{arguments.tokens}"
    print(store.write_result(f"prefill_memory{suffix}", {"prefill_memory": result}))


if __name__ == "__main__":
    main()
