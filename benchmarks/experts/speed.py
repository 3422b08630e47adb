"""The cost of experts beside a dense model of the same active parameters: steps and prefills of 2,048 tokens, in turns.

    python -m benchmarks.experts.speed --write             # fp32 and int4: four minutes of one core, 3 GB of disk
    python -m benchmarks.experts.speed --weights int4 --rounds 3

Both models are in memory at once. Each round has one prefill of each, then steps of each in bursts that alternate; who
begins changes from round to round. Every step has another token, so that it chooses other experts. The figures are the
median ratio of the rounds and its quartiles, by the clock and by the processor's seconds; the latter say more on a
machine that has other work, whose load is recorded. Policy `full`, native operators where they are found.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import machine, store
from benchmarks.decode.onnxruntime_steps import MODEL
from kvc_trt import policies
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.native import native_operators
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import Program
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.config import Experts, ModelConfig, ModelDescription
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.profile.profiled_engine import random_prompts

if TYPE_CHECKING:
    from onnx import ModelProto

TOKENS = 2048
BURST, BURSTS = 8, 4
"""Steps in a row of one side, and how often a round has them."""
ROUNDS = 9
VOCABULARY = 4096
"""Small: a head of 32,000 rows would be a third of a step, and hide the cost of the experts."""
COUNT, CHOSEN = 16, 2
_DENSE = replace(MODEL, vocab_size=VOCABULARY)
SIDES: dict[str, ModelConfig] = {
    "dense": _DENSE,
    "experts": replace(
        _DENSE,
        architecture="MixtralForCausalLM",
        intermediate_size=MODEL.intermediate_size // CHOSEN,
        description=ModelDescription(experts=Experts(COUNT, CHOSEN, MODEL.intermediate_size // CHOSEN)),
    ),
}
BARS = {"decode": 1.25, "prefill": 1.5}
Seconds = tuple[float, float]


class Side:
    """One model in memory with a prompt in its cache; both calls return seconds of the clock and of the processor."""

    def __init__(
        self,
        model: ModelConfig,
        weights: str,
        directory: Path,
        threads: int,
        tokens: int,
        changed: Callable[[ModelProto], ModelProto] = lambda graph: graph,
    ) -> None:
        """Write random weights into the directory, or read those that another side of this model wrote there.

        `changed` are the graphs that run, when they are first needed."""
        path, steps = directory / "weights.safetensors", (BURST + 1) * BURSTS
        if not path.exists():
            write_weights(model, RandomWeights(model, 0), path, weights=weights, length=tokens + steps)
        self._parameters = policies.resolve(
            "full", model=model, token_budget=None, max_input_len=tokens, max_output_len=steps
        )
        stored = GraphWeights(path)
        self.bytes = path.stat().st_size
        program = Program(
            model,
            self._parameters,
            state_tensors(model, self._parameters, "float32"),
            HeldFile(path),
            lambda: changed(build_prefill(model, self._parameters, weights=stored)),
            lambda: changed(build_decode(model, self._parameters, weights=stored)),
        )
        self._executor = OnnxRuntimeExecutor(program, RunOptions(threads=threads))
        self._executor.allocate(1)
        self._caches = len(self._executor.limits.capacities)
        self._prompts = random_prompts(1, tokens, model.vocab_size)
        self._vocabulary = model.vocab_size
        self._lengths, self._tokens = np.array([tokens]), np.random.default_rng(0)
        self._step = 0

    def prefill(self) -> Seconds:
        """One prefill of the prompt, whose cache the next steps go on from."""
        found, seconds = _timed(lambda: self._executor.prefill(self._prompts, self._lengths))
        self._executor.insert(found, 0, 0)
        self._step = 0
        return seconds

    def steps(self) -> Seconds:
        """Several steps after an untimed one, each with a token of its own."""
        self._one()

        def burst() -> None:
            for _ in range(BURST):
                self._one()

        clock, processor = _timed(burst)[1]
        return clock / BURST, processor / BURST

    def _one(self) -> None:
        stored = self._prompts.shape[1] + self._step
        token = self._tokens.integers(0, self._vocabulary, 1)
        self._executor.decode(token, np.array([stored]), np.full((self._caches, 1), stored))
        self._step += 1


def _timed(work: Callable[[], Any]) -> tuple[Any, Seconds]:
    clock, processor = time.perf_counter(), time.process_time()
    found = work()
    return found, (time.perf_counter() - clock, time.process_time() - processor)


def measure(weights: str, rounds: int, threads: int, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        sides = {}
        for side, model in SIDES.items():
            directory = Path(name) / side
            directory.mkdir()
            sides[side] = Side(model, weights, directory, threads, tokens)
        for one in sides.values():
            one.prefill()
            one.steps()
        load_before = os.getloadavg()
        seconds = in_rounds(sides, rounds)
        return {
            "weights": weights,
            "commit": machine.commit(),
            "threads": threads,
            "rounds": rounds,
            **{part: compared(seconds[part], "experts", "dense") for part in BARS},
            "weights_bytes": {side: one.bytes for side, one in sides.items()},
            "load_average_before_and_after": [load_before[0], os.getloadavg()[0]],
        }


def in_rounds(sides: dict[str, Side], rounds: int, bursts: int = BURSTS) -> dict[str, dict[str, list[Seconds]]]:
    """Return the seconds of each part and side, one pair of numbers a round; a round's step is its median burst."""
    found: dict[str, dict[str, list[Seconds]]] = {part: {side: [] for side in sides} for part in BARS}
    order = list(sides)
    for _ in range(rounds):
        for side in order:
            found["prefill"][side].append(sides[side].prefill())
        steps: dict[str, list[Seconds]] = {side: [] for side in sides}
        for _ in range(bursts):
            for side in order:
                steps[side].append(sides[side].steps())
        for side, runs in steps.items():
            clock, processor = (median(run[which] for run in runs) for which in (0, 1))
            found["decode"][side].append((clock, processor))
        order.reverse()
    return found


def compared(seconds: dict[str, list[Seconds]], side: str, other: str) -> dict[str, Any]:
    """Return medians of two sides, and the ratio side / other of the rounds with its quartiles."""
    both = {name: seconds[name] for name in (side, other)}
    return {
        name: {**{f"{one}_s": median(run[which] for run in runs) for one, runs in both.items()},
               **_ratio([run[which] / beside[which] for run, beside in zip(*both.values(), strict=True)])}
        for which, name in enumerate(("clock", "processor"))
    }  # fmt: skip


def _ratio(ratios: list[float]) -> dict[str, float]:
    first, _, third = quantiles(ratios, n=4)
    return {"ratio": median(ratios), "first_quartile": first, "third_quartile": third}


def report(row: dict[str, Any]) -> None:
    for part, bar in BARS.items():
        for clock, found in row[part].items():
            print(
                f"{row['weights']:>4} {part:>7} by {clock:>9}: dense {found['dense_s'] * 1e3:8.1f} ms, experts "
                f"{found['experts_s'] * 1e3:8.1f} ms, ratio {found['ratio']:.2f} ({found['first_quartile']:.2f} to "
                f"{found['third_quartile']:.2f}, {row['rounds']} rounds; bar {bar})",
                flush=True,
            )


def write(row: dict[str, Any], tokens: int) -> None:
    """Write the rows beside those of other weights measured before, each with the commit that it ran at."""
    shape, path, native = SIDES["dense"], store.recorded_path("experts"), native_operators()
    earlier = store.read(path)["rows"] if path.exists() else []
    result = {
        "model": f"{shape.num_hidden_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_attention_heads}/{shape.num_key_value_heads} heads of {shape.head_size}, random weights",
        "feed_forward": f"dense {shape.intermediate_size}; {COUNT} experts of {shape.intermediate_size // CHOSEN}, "
        f"{CHOSEN} of a token",
        "prompt_tokens": tokens,
        "native": None if native is None else native.instructions,
        "bars": BARS,
        "rows": [*(one for one in earlier if one["weights"] != row["weights"]), row],
    }
    print(store.write_result("experts", result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=["fp32", "int4"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--write", action="store_true", help="store the figures in benchmarks/results/")
    arguments = parser.parse_args()
    for weights in arguments.weights:
        row = measure(weights, arguments.rounds, arguments.threads, arguments.tokens)
        report(row)
        if arguments.write:
            write(row, arguments.tokens)


if __name__ == "__main__":
    main()
