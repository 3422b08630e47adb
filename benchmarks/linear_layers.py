"""The effect of native operators and wide inputs on linear layers: prefills of 2,000 tokens, and steps, in turns.

    python -m benchmarks.linear_layers                     # four minutes of one core, 1 GB of disk
    python -m benchmarks.linear_layers --rounds 3 --threads 2

A model in the shape of a small Qwen3.5, with random weights in int4, is in memory three times: as a build makes it;
with the bodies of the operators of linear layers (KvcDeltaRule, KvcDeltaStep) in place of the native ones; and with
inputs of 8 bits where the build takes 15. All other operators are native in each. Each round has one prefill of each,
then steps in bursts that alternate; who begins changes from round to round. The result is
benchmarks/results/linear_layers.json; docs/decisions/0049 has its figures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx.inliner
from onnx import ModelProto

from benchmarks import store
from benchmarks.decode.onnxruntime_steps import MODEL as DENSE
from benchmarks.experts.speed import VOCABULARY, Side, compared, in_rounds
from kvc_trt.backends.onnxruntime.native import native_operators
from kvc_trt.models.config import Attention, Linear, ModelDescription
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.linear.delta_rule import DELTA_RULE
from kvc_trt.operators.linear.delta_step import DELTA_STEP

NAME = "linear_layers"
TOKENS, ROUNDS, WEIGHTS = 2000, 5, "int4"
LAYERS, EVERY = 24, 4
"""The last of every EVERY layers is full."""
PART = Linear(key_heads=16, value_heads=16, key_size=128, value_size=128, kernel=4)
MODEL = replace(
    DENSE,
    architecture="Qwen3_5ForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_size=256,
    qk_norm=True,
    description=ModelDescription(
        attention=tuple(
            Attention(linear=PART) if (layer + 1) % EVERY else Attention(gated=True) for layer in range(LAYERS)
        )
    ),
)
BUILT, BODIES, NARROW = "built", "bodies", "narrow"


def by_bodies(graph: ModelProto) -> ModelProto:
    """Put the bodies of the operators of linear layers into a graph: a native operator would win over its function."""
    return onnx.inliner.inline_selected_functions(graph, [(KVC_DOMAIN, one.name) for one in (DELTA_RULE, DELTA_STEP)])


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """Return the ratios of a build's prefills and steps to those of the other two."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: _side(name, Path(folder) / name, threads) for name in (BUILT, BODIES, NARROW)}
        load_before = os.getloadavg()
        seconds = in_rounds(sides, rounds)
        return {
            "weights": WEIGHTS, "threads": threads, "rounds": rounds, "prompt_tokens": TOKENS,
            "load_average_before_and_after": [load_before[0], os.getloadavg()[0]],
            "rows": [
                {"part": part, "beside": other, **compared(seconds[part], BUILT, other)}
                for part in ("prefill", "decode") for other in (BODIES, NARROW)
            ],
        }  # fmt: skip


def _side(name: str, directory: Path, threads: int) -> Side:
    directory.mkdir()
    changed: Callable[[ModelProto], ModelProto] = by_bodies if name == BODIES else lambda graph: graph
    narrow = patch("kvc_trt.graph.layers.Layers._reads_wide", lambda _self, _matrix: False)
    side = Side(MODEL, WEIGHTS, directory, threads, TOKENS, changed)
    with narrow if name == NARROW else nullcontext():
        side.prefill()
        side.steps()
    return side


def main() -> None:
    """Measure, print the ratios, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    native = native_operators()
    if native is None:
        raise SystemExit("error: there are no native operators to measure; make native")
    result = {"native": native.instructions, **measure(arguments.rounds, arguments.threads)}
    for row in result["rows"]:
        for clock in ("clock", "processor"):
            found, other = row[clock], row["beside"]
            print(
                f"{row['part']:>7} by {clock:>9}: built {found[f'{BUILT}_s'] * 1e3:8.1f} ms, {other} "
                f"{found[f'{other}_s'] * 1e3:8.1f} ms, ratio {found['ratio']:.2f} "
                f"({found['first_quartile']:.2f} to {found['third_quartile']:.2f})"
            )
    print(store.write_result(NAME, result))


if __name__ == "__main__":
    main()
