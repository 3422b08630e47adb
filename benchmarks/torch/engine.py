"""An engine on the torch backend of this machine's GPU: every rung of verify, and a profile. Seconds to minutes.

    python -m benchmarks.torch.engine                              # retrieval-tiny in bf16 and fp16
    python -m benchmarks.torch.engine --weights bf16 --model llama3.1-8b --random-weights 0 --levels ops

The engines are built into a temporary folder, or were built beforehand into `--engines`, for a machine that lacks the
packages of a build. The result goes to benchmarks/results/torch_engine.json, point by point (gpu/points.py); the exit
status is 1 where a verification fails, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.choice import add_argument, chosen
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.points import FAILED, Point, Results, add_arguments
from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine import EngineDirectory
from kvc_trt.profile.request import ProfileRequest, default_contexts
from kvc_trt.profile.run import profile_engine
from kvc_trt.progress import NullProgress
from kvc_trt.verify.ladder import verify

WEIGHTS = ("bf16", "fp16")
LEVELS = ("quick", "full")
POINT_SECONDS = 240.0


def build(directory: Path, weights: str, options: argparse.Namespace) -> EngineDirectory:
    """Build an engine under RocketKV, with room for the longest prompt that the checks use."""
    from kvc_trt.cli.main import run as command

    settings = ["--backend", "torch", "--policy", "rocketkv", "--weights", weights, "--model", options.model]
    sizes = ["--token-budget", options.token_budget, "--max-input-len", options.max_input_len]
    made = [] if options.random_weights is None else ["--random-weights", options.random_weights]
    if status := command(["build", *settings, *sizes, *made, "--no-verify", "-o", str(directory)]):
        raise RuntimeError(f"kvc-trt build ended with {status}")
    return open_engine(directory)


def verified(engine: EngineDirectory, level: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the report of one level."""
    report = verify(engine, RunOptions("torch"), level=level, steps=options.steps)
    print(report.as_text(), flush=True)
    return {**report.to_json(), "engine": engine.path.name}


def profiled(engine: EngineDirectory, gpu: Gpu) -> dict[str, Any]:
    """Return a profile of the longest prompt."""
    request = ProfileRequest(default_contexts(engine.parameters)[-1:], (1, 8), 50, 20.0, 3, 60.0, RunOptions(threads=1))
    return gpu.publishable(profile_engine(engine, request, NullProgress()))


def points(root: Path, gpu: Gpu, options: argparse.Namespace) -> Iterator[Point]:
    """Yield every level and a profile of each engine; an engine is opened, or built, at its first point."""

    @cache
    def engine(weights: str) -> EngineDirectory:
        if options.engines is not None:
            return open_engine(options.engines / weights)
        return build(root / weights, weights, options)

    def verification(weights: str, level: str) -> Mapping[str, Any]:
        return verified(engine(weights), level, options)

    def profile_of(weights: str) -> Mapping[str, Any]:
        return profiled(engine(weights), gpu)

    for weights in options.weights:
        for level in options.levels:
            identity = {"name": "verify", "level": level, "weights": weights}
            yield identity, partial(verification, weights, level)
        if options.profile:
            yield {"name": "profile", "weights": weights}, partial(profile_of, weights)


def line(entry: Mapping[str, Any]) -> str:
    if entry["name"] == "verify":
        return "passed" if entry["passed"] else "not passed"
    return "; ".join(entry["findings"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS))
    parser.add_argument("--model", default="retrieval-tiny")
    parser.add_argument("--random-weights", metavar="SEED", help="where the model has no checkpoint here")
    parser.add_argument("--token-budget", default="64")
    parser.add_argument("--max-input-len", default="512")
    parser.add_argument("--levels", nargs="*", default=list(LEVELS), help="of verify")
    parser.add_argument("--steps", type=int, help="decode steps of verify")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--engines", type=Path, metavar="DIR", help="engines that were built before: DIR/bf16, DIR/fp16"
    )
    parser.add_argument("--output", default="torch_engine", help="benchmarks/results/OUTPUT.json")
    add_argument(parser)
    add_arguments(parser, POINT_SECONDS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    gpu = chosen(options)
    head = {"device": gpu.record(), "model": options.model}
    results = Results(options.output, head, gpu, resume=options.resume, seconds=options.point_seconds)
    with tempfile.TemporaryDirectory() as root:
        results.measure("points", points(Path(root), gpu, options), line)
    print(results.path)
    passed = all(entry.get("passed", True) for entry in results.entries("points"))
    return results.status if passed else FAILED


if __name__ == "__main__":
    sys.exit(main())
