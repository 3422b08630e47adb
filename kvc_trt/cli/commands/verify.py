"""`kvc-trt verify`: is an engine right? Against PyTorch, from single operators up to a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup
from click.core import ParameterSource

from kvc_trt import Engine
from kvc_trt.accuracy.cell import ENOUGH_ANSWERED
from kvc_trt.accuracy.grid import PLAIN, Variant
from kvc_trt.backends.probes import require_torch
from kvc_trt.backends.registry import backends, names, open_engine, program_backend, runner
from kvc_trt.backends.run_options import PrefillPrecision
from kvc_trt.cli.options.types import PREFILL_PRECISION, SEALED, CountOrByName, Counts, Names
from kvc_trt.cli.text import printing
from kvc_trt.errors import VerificationFailed
from kvc_trt.files.atomic import check_new_file, write_json
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

if TYPE_CHECKING:
    from kvc_trt.accuracy.cell import Cell
    from kvc_trt.accuracy.pages.report import AccuracyReport

_PERCENT = click.FloatRange(0, 100)
TASK_OPTIONS = cloup.option_group(
    "Options of --level tasks",
    cloup.option("--model", metavar="NAME|DIR", help="A model in place of ENGINE; needs no engine to be built."),
    cloup.option("--policies", type=Names(), help="With --model.  [default: all]"),
    cloup.option("--budgets", type=Counts(), help="With --model: token budgets.  [default: the preset's, x2, x4]"),
    cloup.option(
        "--weights", type=click.Choice(["fp32", "fp16", "int8", "int4", "keep"]),
        help="With --model: stored weights.  [default: fp32, where it fits]",
    ),
    cloup.option("--tasks", type=Names(), help="What to ask (`kvc-trt tasks`).  [default: needles and lines]"),
    cloup.option(
        "--data", type=click.Path(path_type=Path), metavar="FILE",
        help="Ask the questions of a file of JSON lines instead (docs/data.md); --tasks then names its sets.",
    ),
    cloup.option(
        "--truncate", type=click.Choice(["middle"]),
        help="With --data: leave out the middle of prompts that are too long.  [default: they are refused]",
    ),
    cloup.option(
        "--lengths", type=Counts(),
        help="Tokens of prompt and answer.  [default: longest, /2, /4; with --data, what its longest prompt takes]",
    ),
    cloup.option(
        "--modes", type=Names(), help="query-aware, query-agnostic, stored-context, ...  [default: first two]"
    ),
    cloup.option("--framing", type=click.Choice(["plain", "chat"]), help="chat: by the template.  [default: plain]"),
    cloup.option(
        "--max-new-tokens", type=CountOrByName(), metavar="N|TASK=N,..",
        help="Longest answer, of all tasks or by task.  [default: each task's own]",
    ),
    cloup.option("--minimum-accuracy", type=_PERCENT, help="Percent of what the full cache answers."),
    cloup.option("--maximum-loss", type=_PERCENT, help="Points that none may lose against it, on all."),
    cloup.option(
        "--output-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
        help="Results, kept cell by cell, and the report.  [default: accuracy/NAME]",
    ),
)  # fmt: skip
_ENGINE_HAS = ("policies", "budgets", "weights")
"""Options of --level tasks that an engine has already."""


@cloup.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@cloup.option_group(
    "Options",
    cloup.option(
        "--level",
        type=click.Choice(["quick", "full", "ops", "codes", "logits", "tokens", "retrieval", "tensors", "tasks"]),
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
    SEALED,
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
@TASK_OPTIONS
def command(
    engine: Path | None,
    level: str,
    backend: str | None,
    kernels: Path | None,
    prefill_precision: PrefillPrecision,
    sealed: bool,
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

    The ladder: ops (indices equal, values within the bar), codes (what caches in a format hold, bit for bit), logits
    (teacher-forced), tokens (greedy), retrieval (accuracy, full and compressed); and two controls: dense where it fits,
    bit for bit, and compression active where it does not. --backend torch sends all of it through the kernels of a
    library that was compiled from plugins_cuda/, on a GPU or emulated. Exit code 1 if anything is outside the recorded
    thresholds.

    --level tasks asks the tasks of `kvc-trt tasks` of ENGINE beside its dense twin, or with --model of a model under
    many policies and token budgets; results are kept question by question, and a second run goes on where one stopped.
    """
    if level != "tasks" or replay is not None:
        require_torch("--level tasks, which compares with the whole cache")
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
        _run_tasks(engine, file, as_json, sealed, **shared, **tasks)
        return
    _refuse_tasks(tasks, level)
    if engine is None:
        raise click.UsageError("Missing argument 'ENGINE'.")
    directory = file if level == "tensors" else None
    file = None if level == "tensors" else file
    if file is not None:
        check_new_file(file, replace=True)
    opened = Engine.open(
        engine, backend=backend, prefill_precision=prefill_precision, sealed=sealed, progress=printing.progress()
    )
    report = opened.verify(
        level, kernels=kernels, steps=steps, samples=samples, checkpoint=checkpoint, seed=seed, directory=directory
    )
    if file is not None:
        write_json(file, report.to_json())
    if as_json:
        printing.print_json(report.to_json())
    else:
        printing.show(report.as_text())
    if not report.passed:
        reason = report.failures[0] if report.failures else "nothing could be checked"
        raise VerificationFailed(f"{engine} did not pass verification: {reason}")


def _replay(engine: Path | None, proof: Path, file: Path | None, as_json: bool) -> None:
    """Check a proof and say what was found; VerificationFailed, naming the first problem, if it is not true."""
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
        printing.show(report.as_text())
    if not report.passed:
        if report.problems:
            raise VerificationFailed(f"{proof} is not true of {engine}: {report.problems[0]}")
        raise VerificationFailed(f"{proof} is not confirmed by {engine}: {report.differences[0]}")


def _refuse_tasks(given: Mapping[str, Any], level: str) -> None:
    """Refuse options of --level tasks at another level."""
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --level tasks, found --level {level}")


def _run_tasks(engine: Path | None, file: Path | None, as_json: bool, sealed: bool, **given: Any) -> None:
    """Measure what compression costs in answers, and report it; VerificationFailed where a bar does not hold."""
    from kvc_trt.accuracy.request import AccuracyRequest, measure_engine, measure_policies

    _check_combination(engine, given)
    if given["truncate"] is not None and given["data"] is None:
        raise click.UsageError("--truncate goes with --data: generated tasks are as long as --lengths says")
    if file is not None:
        check_new_file(file, replace=True)
    progress = printing.progress()
    asked = AccuracyRequest(
        tasks=given["tasks"],
        lengths=given["lengths"],
        modes=given["modes"],
        framing=given["framing"] or PLAIN,
        samples=given["samples"],
        data=given["data"],
        truncate=given["truncate"],
        seed=given["seed"],
        max_new_tokens=given["max_new_tokens"],
        minimum_accuracy=_share(given["minimum_accuracy"]),
        maximum_loss=_share(given["maximum_loss"]),
        directory=given["output_dir"],
    )
    if engine is not None:
        name, opened = engine.name, open_engine(engine, sealed=sealed, progress=progress)
        backend = runner(opened.backend, given["backend"])
        report = measure_engine(opened, backend, asked, kernels=given["kernels"], progress=progress)
    else:
        name = Path(given["model"]).name
        report = measure_policies(
            given["model"],
            asked,
            policies=given["policies"],
            budgets=given["budgets"],
            weights=given["weights"] or "auto",
            checkpoint=None if given["checkpoint"] is None else str(given["checkpoint"]),
            progress=progress,
        )
    if file is not None:
        write_json(file, report.to_json())
    if as_json:
        printing.print_json(report.to_json())
    else:
        printing.show(_accuracy_text(report, asked.directory_for(name)))
    if not report.passed:
        reason = report.failures[0] if report.failures else "no policy applies to any question"
        raise VerificationFailed(f"{name}: {reason}")


def _check_combination(engine: Path | None, given: Mapping[str, Any]) -> None:
    if (engine is None) == (given["model"] is None):
        raise click.UsageError("--level tasks takes either ENGINE or --model")
    if engine is not None:
        for name in _ENGINE_HAS:
            if given[name] is not None:
                raise click.UsageError(f"--{name}: an engine has its own; --model measures others")
        if given["checkpoint"] is not None:
            raise click.UsageError("--checkpoint: an engine has its own weights; --model takes another's")
    elif given["backend"] not in (None, runs := program_backend().name) or given["kernels"] is not None:
        raise click.UsageError(f"--backend, --kernels: engines of --model are built in memory, for {runs}")
    able = [name for name, each in backends().items() if each.calls_kernels]
    if given["kernels"] is not None and given["backend"] not in able:
        raise click.UsageError(f"--kernels goes with --backend {' or '.join(able)}")


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _accuracy_text(report: AccuracyReport, directory: Path) -> str:
    """Return one table per mode and length, then what does not count, and where the files are."""
    tables = [_table(report, mode, length) for mode in report.modes for length in report.lengths]
    return "\n\n".join([_head(report), *tables, "\n".join([*_notes(report), f"report: {directory / 'report.html'}"])])


def _head(report: AccuracyReport) -> str:
    settings = report.settings
    return (
        f"accuracy of {settings['model']}, {settings['weights']} weights, {settings['backend']}: greedy answers, "
        f"{_of_questions(report)}"
    )


def _of_questions(report: AccuracyReport) -> str:
    settings = report.settings
    if "data" in settings:
        return f"percent ± standard error, questions of {settings['data']} ({settings['data_sha256'][:12]})"
    return f"percent ± standard error, n = {settings['samples']} per cell, seed {settings['seed']}"


def _table(report: AccuracyReport, mode: str, length: int) -> str:
    rows = []
    for variant in report.variants:
        cells = [report.cell(report.group(task, mode, length), variant) for task in report.tasks]
        average = report.average(mode, length, variant)
        stored = next((cell.row_bytes for cell in cells if cell is not None and cell.row_bytes), None)
        rows.append(
            [
                variant.policy,
                "-" if variant.token_budget is None else f"{variant.token_budget:,}",
                "-" if stored is None else readable_size(stored),
                *map(_cell, cells),
                "n/a" if average is None else str(average[0]),
            ]
        )
    headers = ["policy", "budget", "cache/row", *report.tasks, "mean"]
    return f"{mode}, {length:,} tokens\n{text_table(headers, rows, right=range(1, len(headers)))}"


def _cell(cell: Cell | None) -> str:
    if cell is None or not cell.scores:
        return "n/a"
    if cell.in_nats:
        return cell.figure
    kept = cell.on_answered if cell.policy != "full" and cell.full_accuracy != 1 else None
    answered = "" if kept is None else f" ({100 * kept.value:.0f} of {kept.samples})"
    return cell.figure + answered + ("" if cell.evidence else " *")


def _notes(report: AccuracyReport) -> Iterable[str]:
    if report.not_learned:
        few = f"the full cache answers fewer than {ENOUGH_ANSWERED} questions"
        yield f"* not learned: {few}, and the cell does not count"
    if any(cell.full_accuracy != 1 and cell.on_answered is not None for cell in report.cells if cell.policy != "full"):
        yield "in brackets: of the questions that the full cache answers"
    reasons: dict[str, list[str]] = {}
    for cell in report.not_applicable:
        variant = str(Variant(cell.policy, cell.token_budget))
        if variant not in (known := reasons.setdefault(cell.reason, [])):
            known.append(variant)
    for reason, variants in reasons.items():
        yield f"n/a: {', '.join(variants)}: {reason}"
    bars = {name.replace("_", " "): value for name, value in vars(report.bars).items() if value is not None}
    if bars:
        yield "thresholds: " + ", ".join(f"{name} {value:.1%}" for name, value in bars.items())
        yield from (f"FAILED: {line}" for line in report.failures)
        yield "PASSED" if report.passed else f"FAILED: {len(report.failures)} of the bars do not hold"
