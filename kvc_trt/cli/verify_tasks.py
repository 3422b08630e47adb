"""`kvc-trt verify --level tasks`: the options that only it takes, and what it does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvc_trt.cli import output
from kvc_trt.cli.counts import CountOrByName, Counts, Names
from kvc_trt.cli.sections import option

if TYPE_CHECKING:
    from kvc_trt.accuracy.grid import Variant
    from kvc_trt.accuracy.model_under_test import ModelUnderTest
    from kvc_trt.progress import Progress

Function = TypeVar("Function", bound=Callable[..., Any])

SAMPLES = 50
_SECTION = "Options of --level tasks"
_PERCENT = click.FloatRange(0, 100)
_OPTIONS = (
    option(_SECTION, "--model", metavar="NAME|DIR", help="A model in place of ENGINE; needs no engine to be built."),
    option(_SECTION, "--policies", type=Names(), help="With --model.  [default: all]"),
    option(_SECTION, "--budgets", type=Counts(), help="With --model: token budgets.  [default: the preset's, x2, x4]"),
    option(
        _SECTION, "--weights", type=click.Choice(["fp32", "fp16", "int8", "int4"]),
        help="With --model: stored weights.  [default: fp32, where it fits]",
    ),
    option(_SECTION, "--tasks", type=Names(), help="What to ask (`kvc-trt tasks`).  [default: needles and lines]"),
    option(_SECTION, "--lengths", type=Counts(), help="Tokens of prompt and answer.  [default: longest, /2, /4]"),
    option(_SECTION, "--modes", type=Names(), help="query-aware, query-agnostic.  [default: both]"),
    option(
        _SECTION, "--max-new-tokens", type=CountOrByName(), metavar="N|TASK=N,..",
        help="Longest answer, of all tasks or by task.  [default: each task's own]",
    ),
    option(_SECTION, "--minimum-accuracy", type=_PERCENT, help="Percent that every cell that counts must reach."),
    option(_SECTION, "--maximum-loss", type=_PERCENT, help="Points that none may lose against the full cache."),
    option(
        _SECTION, "--output-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
        help="Results, kept cell by cell, and the report.  [default: accuracy/NAME]",
    ),
)  # fmt: skip
_ENGINE_HAS = ("policies", "budgets", "weights")


def options(function: Function) -> Function:
    """Add the options to a command."""
    return reduce(lambda decorated, decorator: decorator(decorated), reversed(_OPTIONS), function)


def refuse(given: Mapping[str, Any], level: str) -> None:
    """UsageError for an option of this level at another."""
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --level tasks, found --level {level}")


def run(engine: Path | None, file: Path | None, as_json: bool, **given: Any) -> None:
    """Measure, write the report, print it; VerificationFailed where a bar does not hold."""
    from kvc_trt.accuracy.grid import grid_for
    from kvc_trt.accuracy.measure import Sampling
    from kvc_trt.accuracy.report import Bars
    from kvc_trt.accuracy.run import evaluate
    from kvc_trt.atomic_files import check_new_file, write_json
    from kvc_trt.cli.verify_tasks_text import accuracy_text
    from kvc_trt.errors import VerificationFailed

    _check_combination(engine, given)
    if file is not None:
        check_new_file(file, replace=True)
    name = engine.name if engine is not None else Path(given["model"]).name
    directory = given["output_dir"] or Path("accuracy") / re.sub(r"[^A-Za-z0-9._+-]", "-", name)
    progress = output.progress()
    _check_names(given["max_new_tokens"])
    bars = Bars(_share(given["minimum_accuracy"]), _share(given["maximum_loss"]))
    sampling = Sampling(given["samples"] or SAMPLES, given["seed"], given["max_new_tokens"])
    with _measured(engine, given, progress) as (model, variants, longest):
        groups = grid_for(longest, given["tasks"], given["lengths"], given["modes"])
        report = evaluate(model, variants, groups, sampling, directory, bars=bars, progress=progress)
    if file is not None:
        write_json(file, report.to_json())
    if as_json:
        output.print_json(report.to_json())
    else:
        click.echo(accuracy_text(report, directory))
    if not report.passed:
        reason = report.failures[0] if report.failures else "no policy applies to any question"
        raise VerificationFailed(f"{name}: {reason}")


@contextlib.contextmanager
def _measured(
    engine: Path | None, given: Mapping[str, Any], progress: Progress
) -> Iterator[tuple[ModelUnderTest, list[Variant], int]]:
    """What is measured, its policies and budgets, and the longest questions it takes by default."""
    from kvc_trt.accuracy.grid import budgets_of, longest_of, policies_of, variants
    from kvc_trt.kernels import use_library

    if engine is None:
        from kvc_trt.accuracy.policy_engines import open_model

        # Names are checked before weights are read.
        chosen = variants(policies_of(given["policies"]), given["budgets"] or budgets_of(given["model"]))
        checkpoint = None if given["checkpoint"] is None else str(given["checkpoint"])
        with open_model(
            given["model"], checkpoint=checkpoint, weights=given["weights"] or "auto", progress=progress
        ) as model:
            yield model, chosen, longest_of(given["model"])
        return
    from kvc_trt.accuracy.model_under_test import BuiltEngine
    from kvc_trt.backends.session import runner
    from kvc_trt.engine import Engine

    opened = Engine.open(engine, progress=progress)
    with contextlib.nullcontext() if given["kernels"] is None else use_library(given["kernels"]):
        built = BuiltEngine(opened, runner(opened.backend, given["backend"]))
        yield built, built.variants, opened.parameters.max_input_len


def _check_combination(engine: Path | None, given: Mapping[str, Any]) -> None:
    if (engine is None) == (given["model"] is None):
        raise click.UsageError("--level tasks takes either ENGINE or --model")
    if engine is not None:
        for name in _ENGINE_HAS:
            if given[name] is not None:
                raise click.UsageError(f"--{name}: an engine has its own; --model measures others")
        if given["checkpoint"] is not None:
            raise click.UsageError("--checkpoint: an engine has its own weights; --model takes another's")
    elif given["backend"] not in (None, "onnxruntime") or given["kernels"] is not None:
        raise click.UsageError("--backend, --kernels: engines of --model are built in memory, for onnxruntime")
    if given["kernels"] is not None and given["backend"] != "torch":
        raise click.UsageError("--kernels goes with --backend torch")


def _check_names(rooms: int | Mapping[str, int] | None) -> None:
    from kvc_trt.tasks.registry import task

    for name in rooms if isinstance(rooms, Mapping) else ():
        task(name)


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
