"""`kvc-trt verify`: is an engine right? Against PyTorch, from single operators up to a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import cloup
from click.core import ParameterSource

from kvc_trt.backends.prefill_precision import PrefillPrecision
from kvc_trt.backends.registry import names
from kvc_trt.cli import printing, verify_tasks
from kvc_trt.cli.option_types import PREFILL_PRECISION


@cloup.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@cloup.option_group(
    "Options",
    cloup.option(
        "--level",
        type=click.Choice(["quick", "full", "ops", "logits", "tokens", "retrieval", "tensors", "tasks"]),
        default="quick",
        help="All rungs, quickly or thoroughly, or one rung; tensors: where executors first differ, by Polygraphy; "
        "tasks: what compression costs in answers.",
    ),
    cloup.option(
        "--backend",
        type=click.Choice(names()),
        help="What runs the engine (torch: its weights around the CUDA kernels).  [default: what it was built for]",
    ),
    cloup.option(
        "--kernels",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help="Kernel library for --backend torch.  [default: KVC_TRT_KERNELS, or the package's own]",
    ),
    PREFILL_PRECISION,
    cloup.option("--steps", type=int, help="Teacher-forced steps and greedy tokens.  [default: by level]"),
    cloup.option("--samples", type=int, help="Questions per length and mode.  [default: by level]"),
    cloup.option(
        "--checkpoint",
        type=click.Path(path_type=Path),
        help="Hugging Face directory or GGUF file: also measure what the engine's weight format costs; with --model, "
        "its weights.",
    ),
    cloup.option("--seed", type=int, default=0, help="Seed of prompts and inputs."),
    cloup.option(
        "--replay",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Check the proof that run --kv-proof wrote: the reference reads the same tokens and compares every list.",
    ),
    cloup.option(
        "-o",
        "--output",
        "file",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="Write the report as JSON; with --level tensors, Polygraphy's files into this directory.",
    ),
)
@printing.json_option
@verify_tasks.options
def command(
    engine: Path | None,
    level: str,
    backend: str | None,
    kernels: Path | None,
    prefill_precision: PrefillPrecision,
    steps: int | None,
    samples: int | None,
    checkpoint: Path | None,
    seed: int,
    replay: Path | None,
    file: Path | None,
    as_json: bool,
    **tasks: Any,
) -> None:
    """Check an engine against the PyTorch reference, from single operators up to a task.

    The ladder: ops (indices equal, values within the bar), logits (teacher-forced), tokens (greedy), retrieval
    (accuracy, full and compressed); and two controls: dense where it fits, bit for bit, and compression active where it
    does not. --backend torch sends all of it through the kernels of a library that was compiled from plugins_cuda/, on
    a GPU or emulated. Exit code 1 if anything is outside the recorded thresholds.

    --level tasks asks the tasks of `kvc-trt tasks` of ENGINE beside its dense twin, or with --model of a model under
    many policies and token budgets; results are kept question by question, and a second run goes on where one stopped.
    """
    from kvc_trt import Engine
    from kvc_trt.atomic_files import check_new_file, write_json
    from kvc_trt.errors import VerificationFailed
    from kvc_trt.verify import require_torch

    require_torch()
    if replay is not None:
        given = click.get_current_context().get_parameter_source
        taken = {"engine", "replay", "file", "as_json"}
        for parameter in click.get_current_context().command.params:
            name = parameter.name or ""
            if name not in taken and given(name) not in (None, ParameterSource.DEFAULT):
                raise click.UsageError(f"--replay goes with ENGINE, -o and --json, found {parameter.opts[0]}")
        _replay(engine, replay, file, as_json)
        return
    if level in ("tasks", "tensors") and prefill_precision != "f32":
        raise click.UsageError(f"--prefill-precision: --level {level} computes in f32")
    if level == "tasks":
        shared = {"backend": backend, "kernels": kernels, "checkpoint": checkpoint, "seed": seed, "samples": samples}
        if steps is not None:
            raise click.UsageError("--steps: --level tasks generates answers; --max-new-tokens bounds them")
        verify_tasks.run(engine, file, as_json, **shared, **tasks)
        return
    verify_tasks.refuse(tasks, level)
    if engine is None:
        raise click.UsageError("Missing argument 'ENGINE'.")
    directory = file if level == "tensors" else None
    file = None if level == "tensors" else file
    if file is not None:
        check_new_file(file, replace=True)
    opened = Engine.open(engine, backend=backend, prefill_precision=prefill_precision, progress=printing.progress())
    report = opened.verify(
        level, kernels=kernels, steps=steps, samples=samples, checkpoint=checkpoint, seed=seed, directory=directory
    )
    if file is not None:
        write_json(file, report.to_json())
    if as_json:
        printing.print_json(report.to_json())
    else:
        click.echo(report.as_text())
    if not report.passed:
        reason = report.failures[0] if report.failures else "nothing could be checked"
        raise VerificationFailed(f"{engine} did not pass verification: {reason}")


def _replay(engine: Path | None, proof: Path, file: Path | None, as_json: bool) -> None:
    """Check a proof and say what was found; VerificationFailed, naming the first problem, if it is not true."""
    from kvc_trt import Engine
    from kvc_trt.atomic_files import check_new_file, write_json
    from kvc_trt.errors import VerificationFailed

    if engine is None:
        raise click.UsageError("Missing argument 'ENGINE'.")
    if file is not None:
        check_new_file(file, replace=True)
    report = Engine.open(engine, progress=printing.progress()).replay(proof)
    if file is not None:
        write_json(file, report.to_json())
    if as_json:
        printing.print_json(report.to_json())
    else:
        click.echo(report.as_text())
    if not report.passed:
        if report.problems:
            raise VerificationFailed(f"{proof} is not true of {engine}: {report.problems[0]}")
        raise VerificationFailed(f"{proof} is not confirmed by {engine}: {report.differences[0]}")
