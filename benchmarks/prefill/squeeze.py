"""The cost in prefill of layer budgets set for each prompt: rocketkv with and without, in turns, in one run.

    python -m benchmarks.prefill.squeeze --write                  # 1,024 to 8,192 tokens: 15 minutes of one core
    python -m benchmarks.prefill.squeeze --tokens 1024 --pairs 3

Both engines are in memory at once and take turns, each first every other time. The overhead of a pair is the ratio of
its two runs; the figures are the median of the pairs and their quartiles. Seconds of the processor count, not of the
clock: with one thread they say nearly the same on a machine that has other work, whose load is recorded.
SqueezeAttention's own figure (arXiv 2404.04793, table 4) is 6.3%, for an 8K prompt on a GPU.

Memory is resident memory above what both engines hold at rest, in a run of its own. It grows by the tokens that all
layers keep until budgets are known (up to twice the budget) and by caches with room for as many: `--policy snapkv-gqa`
keeps few tokens, and shows the growth that is left then.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine, store
from benchmarks.decode.onnxruntime_steps import MODEL, NEW_TOKENS, TOKEN_BUDGET
from kvc_trt import policies
from kvc_trt.backends.host_memory import watch_memory
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import Program
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.profile.profiled_engine import random_prompts

POLICY = "rocketkv"
SIDES = {"uniform": None, "squeeze_online": "squeeze-online"}
PAPER_OVERHEAD = 0.063
PAIRS = {1024: 15, 2048: 9, 4096: 7, 8192: 5}
FEWEST_PAIRS = 5


def resolve(policy: str, layer_budget: str | None, tokens: int) -> PolicyParameters:
    return policies.resolve(
        policy, model=MODEL, token_budget=TOKEN_BUDGET, max_input_len=tokens, max_output_len=NEW_TOKENS,
        layer_budget=layer_budget,
    )  # fmt: skip


def opened(parameters: PolicyParameters, weights_path: Path, threads: int) -> OnnxRuntimeExecutor:
    weights = GraphWeights(weights_path)
    program = Program(
        MODEL,
        parameters,
        state_tensors(MODEL, parameters, "float32"),
        HeldFile(weights_path),
        lambda: build_prefill(MODEL, parameters, weights=weights),
        lambda: build_decode(MODEL, parameters, weights=weights),
    )
    return OnnxRuntimeExecutor(program, RunOptions(threads=threads))


class Prefill:
    """One engine and one prompt; a call is one whole prefill and returns its seconds of processor and of clock."""

    def __init__(self, executor: OnnxRuntimeExecutor, prompts: NDArray[np.int64]) -> None:
        self._executor, self._prompts = executor, prompts
        self._lengths = np.full(len(prompts), prompts.shape[1])

    def __call__(self) -> tuple[float, float]:
        clock, processor = time.perf_counter(), time.process_time()
        self._executor.prefill(self._prompts, self._lengths)
        return time.process_time() - processor, time.perf_counter() - clock


def measure(policy: str, tokens: int, pairs: int, threads: int, weights_path: Path) -> dict[str, Any]:
    rules = {side: resolve(policy, kind, tokens) for side, kind in SIDES.items()}
    prompts = random_prompts(1, tokens, MODEL.vocab_size)
    prefills = {side: Prefill(opened(rule, weights_path, threads), prompts) for side, rule in rules.items()}
    for prefill in prefills.values():
        prefill()
    peaks = {side: peak_bytes(prefill) for side, prefill in prefills.items()}
    load_before = os.getloadavg()
    seconds = in_turns(prefills, pairs)
    return {
        "tokens": tokens,
        "commit": machine.commit(),
        "threads": threads,
        "pairs": pairs,
        "overhead": paired(seconds, 0),
        "overhead_by_clock": paired(seconds, 1),
        "processor_s": {side: median(run[0] for run in runs) for side, runs in seconds.items()},
        "clock_s": {side: median(run[1] for run in runs) for side, runs in seconds.items()},
        "load_average_before_and_after": [load_before[0], os.getloadavg()[0]],
        "prompt_tokens_kept": {side: rule.most_kept for side, rule in rules.items()},
        "memory": memory(tokens, rules, peaks),
    }


def peak_bytes(prefill: Prefill) -> int:
    with watch_memory() as peak:
        prefill()
    return peak.above


def in_turns(prefills: dict[str, Prefill], pairs: int) -> dict[str, list[tuple[float, float]]]:
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in prefills}
    order = list(prefills)
    for _ in range(pairs):
        for side in order:
            seconds[side].append(prefills[side]())
        order.reverse()
    return seconds


def paired(seconds: dict[str, list[tuple[float, float]]], which: int) -> dict[str, float]:
    uniform, online = (seconds[side] for side in SIDES)
    ratios = [b[which] / a[which] - 1 for a, b in zip(uniform, online, strict=True)]
    first, _, third = quantiles(ratios, n=4)
    return {"median": median(ratios), "first_quartile": first, "third_quartile": third}


def memory(tokens: int, rules: dict[str, PolicyParameters], peaks: dict[str, int]) -> dict[str, Any]:
    """Peaks, beside the prompt's keys and values of one layer and of all: the latter is what is not held."""
    layer = 2 * MODEL.num_key_value_heads * MODEL.head_size * tokens * np.dtype(np.float32).itemsize
    tensors = {side: state_tensors(MODEL, rule, "float32") for side, rule in rules.items()}
    return {
        "peak_above_rest_bytes": peaks,
        "difference_bytes": peaks["squeeze_online"] - peaks["uniform"],
        "caches_bytes": {side: sum(t.bytes_per_row() for t in of_side) for side, of_side in tensors.items()},
        "one_layers_keys_and_values_bytes": layer,
        "all_layers_keys_and_values_bytes": layer * MODEL.num_hidden_layers,
    }


def report(row: dict[str, Any]) -> None:
    overhead, peaks = row["overhead"], row["memory"]["peak_above_rest_bytes"]
    print(
        f"{row['tokens']:>6,} tokens: overhead {overhead['median']:+.1%} "
        f"({overhead['first_quartile']:+.1%} to {overhead['third_quartile']:+.1%}, {row['pairs']} pairs), "
        f"{row['processor_s']['uniform']:.1f} s of one core; peak {peaks['uniform'] / 1e6:.0f} MB, "
        f"with layer budgets {peaks['squeeze_online'] / 1e6:.0f} MB",
        flush=True,
    )


def write(policy: str, row: dict[str, Any]) -> None:
    """Write the lengths beside those measured before, each with the commit that it ran at."""
    name = "squeeze_prefill" if policy == POLICY else f"squeeze_prefill_{policy}"
    path = store.recorded_path(name)
    earlier = store.read(path)["lengths"] if path.exists() else []
    others = [one for one in earlier if one["tokens"] != row["tokens"]]
    result = {
        "policy": policy,
        "token_budget": TOKEN_BUDGET,
        "model": "8 layers, hidden 1024, 16/4 heads of 64, fp32, random weights",
        "paper_overhead": PAPER_OVERHEAD,
        "lengths": sorted([*others, row], key=lambda one: one["tokens"]),
    }
    store.write_result(name, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(PAIRS))
    parser.add_argument("--pairs", type=int, help="of each length  [default: 15 of the shortest, 5 of the longest]")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="store the figures in benchmarks/results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "weights.safetensors"
        write_weights(MODEL, RandomWeights(MODEL, 0), path, weights="fp32", length=max(arguments.tokens) + NEW_TOKENS)
        for tokens in arguments.tokens:
            pairs = arguments.pairs or PAIRS.get(tokens, FEWEST_PAIRS)
            row = measure(arguments.policy, tokens, pairs, arguments.threads, path)
            report(row)
            if arguments.write:
                write(arguments.policy, row)


if __name__ == "__main__":
    main()
