"""Native experts with a clamped gate beside their bodies, in gpt-oss's shape: steps and prefills, in turns.

    python -m benchmarks.experts.clamped                   # int4 and int8: ten minutes of one core, 2 GB of disk
    python -m benchmarks.experts.clamped --weights int4 --rounds 5 --threads 2

Two layers of gpt-oss-20b with random weights, and a small vocabulary, are in memory twice: as a build makes them, and
with the bodies of the operators of experts in place of the native ones. All else is the same on both sides. Each round
has one prefill of each, then steps in bursts that alternate; who begins changes from round to round. The figures are
the median ratio native / bodies of the rounds and its quartiles, by the clock and by the processor's seconds; the
latter say more on a machine that has other work, whose load is recorded. The result is
benchmarks/results/clamped_experts.json; docs/decisions/0047 has its figures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx.inliner
from onnx import ModelProto

from benchmarks import store
from benchmarks.experts.speed import VOCABULARY, Side, compared, in_rounds
from kvc_trt.backends.onnxruntime.native import native_operators
from kvc_trt.models.presets import load_preset
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.experts import CLAMPED_EXPERTS, QUANTISED_CLAMPED_EXPERTS

NAME, PRESET = "clamped_experts", "gpt-oss-20b"
LAYERS, TOKENS, ROUNDS = 2, 128, 3
"""One layer that slides, and one that does not."""
BURSTS = 1
"""A step by bodies takes seconds."""
NATIVE, BODIES = "native", "bodies"


def by_bodies(graph: ModelProto) -> ModelProto:
    """Put the bodies of experts into a graph: a native operator would win over its function."""
    names = {one.name for one in (CLAMPED_EXPERTS, QUANTISED_CLAMPED_EXPERTS)}
    present = names.intersection(body.name for body in graph.functions)
    return onnx.inliner.inline_selected_functions(graph, [(KVC_DOMAIN, name) for name in present])


def measure(weights: str, rounds: int, threads: int) -> dict[str, Any]:
    """Return the ratios native / bodies of prefills and steps with weights of one kind."""
    model = load_preset(PRESET).config
    model = replace(model, dtype="float32", num_hidden_layers=LAYERS, vocab_size=VOCABULARY, eos_token_ids=())
    changes: dict[str, Callable[[ModelProto], ModelProto]] = {NATIVE: lambda graph: graph, BODIES: by_bodies}
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: Side(model, weights, Path(folder), threads, TOKENS, changed) for name, changed in changes.items()
        }
        for side in sides.values():
            side.prefill()
            side.steps()
        load_before = os.getloadavg()
        seconds = in_rounds(sides, rounds, BURSTS)
        return {
            "weights": weights, "threads": threads, "rounds": rounds,
            **{part: compared(found, NATIVE, BODIES) for part, found in seconds.items()},
            "weights_bytes": sides[NATIVE].bytes,
            "load_average_before_and_after": [load_before[0], os.getloadavg()[0]],
        }  # fmt: skip


def report(row: dict[str, Any]) -> None:
    """Print a row's medians and ratios."""
    for part in ("prefill", "decode"):
        for clock, found in row[part].items():
            print(
                f"{row['weights']:>4} {part:>7} by {clock:>9}: native {found[f'{NATIVE}_s'] * 1e3:8.1f} ms, bodies "
                f"{found[f'{BODIES}_s'] * 1e3:8.1f} ms, ratio {found['ratio']:.3f} ({found['first_quartile']:.3f} to "
                f"{found['third_quartile']:.3f}, {row['rounds']} rounds)",
                flush=True,
            )


def main() -> None:
    """Measure, print the ratios, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=["int4", "int8"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    native = native_operators()
    if native is None:
        raise SystemExit("error: there are no native operators to measure; make native")
    rows: list[dict[str, Any]] = []
    result = {
        "model": f"{LAYERS} layers of {PRESET}, vocabulary of {VOCABULARY}, random weights",
        "native": native.instructions,
        "prompt_tokens": TOKENS,
        "rows": rows,
    }
    for weights in arguments.weights:
        rows.append(measure(weights, arguments.rounds, arguments.threads))
        report(rows[-1])
        print(store.write_result(NAME, result))


if __name__ == "__main__":
    main()
