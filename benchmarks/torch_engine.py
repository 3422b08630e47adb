"""An engine on the torch backend of this machine's GPU: every rung of verify, and a profile. Seconds to minutes.

    python -m benchmarks.torch_engine                              # retrieval-tiny in bf16 and fp16
    python -m benchmarks.torch_engine --weights bf16 --model llama3.1-8b --random-weights 0 --level ops

The engines are built into a temporary folder. The result goes to benchmarks/results/torch_engine.json; the exit status
is 1 where a verification fails, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.kernels import CANNOT, cuda_library
from kvc_trt.backends.registry import open_engine
from kvc_trt.cli.main import run as command
from kvc_trt.engine import EngineDirectory
from kvc_trt.profile.request import ProfileRequest, default_contexts
from kvc_trt.profile.run import profile_engine
from kvc_trt.progress import NullProgress
from kvc_trt.verify.ladder import verify

__all__ = ["CANNOT", "main"]


def build(directory: Path, weights: str, options: argparse.Namespace) -> EngineDirectory:
    """Under RocketKV, with room for the longest prompt that the checks use."""
    settings = ["--backend", "torch", "--policy", "rocketkv", "--weights", weights, "--model", options.model]
    sizes = ["--token-budget", options.token_budget, "--max-input-len", options.max_input_len]
    made = [] if options.random_weights is None else ["--random-weights", options.random_weights]
    if status := command(["build", *settings, *sizes, *made, "--no-verify", "-o", str(directory)]):
        raise SystemExit(status)
    return open_engine(directory)


def measured(engine: EngineDirectory, options: argparse.Namespace) -> dict[str, Any]:
    """One entry of the result: the report of every level asked for, and a profile of the longest prompt."""
    entry: dict[str, Any] = {"weights": engine.build.weights, "verify": []}
    for level in options.levels:
        report = verify(engine, level=level, backend="torch", steps=options.steps)
        print(report.as_text(), flush=True)
        entry["verify"].append({**report.to_json(), "engine": engine.path.name})
    if options.profile:
        contexts = default_contexts(engine.parameters)[-1:]
        request = ProfileRequest(contexts, (1, 8), 50, 20.0, 3, 60.0, threads=1)
        entry["profile"] = profile_engine(engine, request, NullProgress())
        print(*entry["profile"]["findings"], sep="\n", flush=True)
    return entry


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp16"])
    parser.add_argument("--model", default="retrieval-tiny")
    parser.add_argument("--random-weights", metavar="SEED", help="where the model has no checkpoint here")
    parser.add_argument("--token-budget", default="64")
    parser.add_argument("--max-input-len", default="512")
    parser.add_argument("--levels", nargs="*", default=["quick", "full"], help="of verify")
    parser.add_argument("--steps", type=int, help="decode steps of verify")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", default="torch_engine", help="benchmarks/results/OUTPUT.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    cuda_library()
    from benchmarks import gpu_timing

    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for weights in options.weights:
            entries.append(measured(build(Path(root) / weights, weights, options), options))
            result = {"device": gpu_timing.device_record(), "model": options.model, "engines": entries}
            print(machine.write_result(options.output, result))
    return int(not all(report["passed"] for entry in entries for report in entry["verify"]))


if __name__ == "__main__":
    sys.exit(main())
