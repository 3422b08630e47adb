"""`kvc-trt verify`: is an engine right? Against PyTorch, from single operators up to a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from kvc_trt import Engine
from kvc_trt.accuracy.cell import ENOUGH_ANSWERED
from kvc_trt.accuracy.grid import PLAIN, Variant
from kvc_trt.accuracy.request import AccuracyRequest, measure_engine, measure_policies
from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.probes import require_torch
from kvc_trt.backends.registry import names, runner
from kvc_trt.cli.options.output import OutputPath
from kvc_trt.cli.options.types import PREFILL_PRECISION, SEALED, CountOrByName, Counts, Names
from kvc_trt.cli.options.verify import VerifyArguments
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
    cloup.option(
        "--model",
        metavar="NAME|PATH|ORG/NAME",
        help="Measure a model instead of ENGINE; no engine has to be built.",
    ),
    cloup.option("--policies", type=Names(), help="With --model: policies to measure.  [default: all]"),
    cloup.option("--budgets", type=Counts(), help="With --model: token budgets.  [default: the preset's, x2, x4]"),
    cloup.option(
        "--weights", type=click.Choice(["fp32", "fp16", "int8", "int4", "keep"]),
        help="With --model: format of stored weights.  [default: fp32, where it fits]",
    ),
    cloup.option("--tasks", type=Names(), help="Tasks to ask (`kvc-trt tasks`).  [default: needles and lines]"),
    cloup.option(
        "--data", type=click.Path(path_type=Path), metavar="FILE",
        help="Ask the questions of a JSON lines file instead (docs/data.md); --tasks then names its "
             "sets.",
    ),
    cloup.option(
        "--truncate", type=click.Choice(["middle"]),
        help="With --data: leave out the middle of prompts that are too long.  [default: refuse them]",
    ),
    cloup.option(
        "--lengths", type=Counts(),
        help="Lengths of prompt and answer together, in tokens.  [default: longest, /2, /4; with "
             "--data, as its longest prompt needs]",
    ),
    cloup.option(
        "--modes", type=Names(), help="query-aware, query-agnostic, stored-context, ...  [default: the first two]"
    ),
    cloup.option(
        "--framing", type=click.Choice(["plain", "chat"]),
        help="plain text, or chat by the model's template.  [default: plain]",
    ),
    cloup.option(
        "--max-new-tokens", type=CountOrByName(), metavar="N|TASK=N,..",
        help="Longest answer in tokens, for all tasks or by task.  [default: each task's own]",
    ),
    cloup.option(
        "--minimum-accuracy", type=_PERCENT,
        help="Bar: smallest accuracy, in percent, on questions that the full cache answers.",
    ),
    cloup.option(
        "--maximum-loss", type=_PERCENT,
        help="Bar: largest loss against the full cache, in points, on all questions.",
    ),
    cloup.option(
        "--output-dir", type=OutputPath(file_okay=False), metavar="DIR",
        help="Directory for the results, stored cell by cell, and the report.  [default: "
             "accuracy/NAME]",
    ),
)  # fmt: skip


@cloup.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@cloup.option_group(
    "Options",
    cloup.option(
        "--level",
        type=click.Choice(["quick", "full", "ops", "codes", "logits", "tokens", "retrieval", "tensors", "tasks"]),
        default="quick",
        help="All rungs, quick or full, or one rung; tensors: where executors first differ, by "
        "Polygraphy; tasks: the loss of right answers through compression.",
    ),
    cloup.option(
        "--backend",
        type=click.Choice(names()),
        help="Backend that runs the engine (torch: its weights around the CUDA kernels).  [default: "
        "the one it was built for]",
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
        help="Hugging Face directory or GGUF file, to measure the cost of the engine's weight format "
        "too; with --model, the model's weights.",
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
        type=OutputPath(),
        metavar="PATH",
        help="Write the report as JSON; with --level tensors, write Polygraphy's files into this directory.",
    ),
)
@printing.json_option
@TASK_OPTIONS
def command(**parameters: Any) -> None:
    """Check an engine against the PyTorch reference, from single operators up to a task.

    The ladder: ops (indices equal, values within the bar), codes (the contents of caches in a format, bit for bit),
    logits (teacher-forced), tokens (greedy), retrieval (accuracy, full and compressed); and two controls: dense where
    it fits, bit for bit, and compression active where it does not. --backend torch sends all of it through the kernels
    of a library that was compiled from plugins_cuda/, on a GPU or emulated. Exit code 1 if anything is outside the
    recorded thresholds.

    --level tasks asks ENGINE and its dense twin the tasks of `kvc-trt tasks`, or with --model a model under many
    policies and token budgets; results are kept question by question, and a second run goes on where the first stopped.
    """
    given = VerifyArguments.of(parameters)
    if given.level != "tasks" or given.replay is not None:
        require_torch("--level tasks, which compares with the whole cache")
    given.check()
    if given.report_file is not None:
        check_new_file(given.report_file, replace=True)
    if given.replay is not None:
        _replay(given, given.replay)
    elif given.level == "tasks":
        _run_tasks(given)
    else:
        _verify(given)


def _verify(given: VerifyArguments) -> None:
    """Climb the ladder, or one rung of it; VerificationFailed, naming the first failure, unless the engine passes."""
    engine = Engine.open(
        given.needed_engine(),
        backend=given.backend,
        prefill_precision=given.prefill_precision,
        sealed=given.sealed,
        progress=printing.progress(),
    )
    report = engine.verify(
        given.level,
        kernels=given.kernels,
        steps=given.steps,
        samples=given.samples,
        checkpoint=given.checkpoint,
        seed=given.seed,
        directory=given.directory,
    )
    _hand_over(given, report.to_json(), report.as_text)
    if not report.passed:
        reason = report.failures[0] if report.failures else "nothing could be checked"
        raise VerificationFailed(f"{given.engine} did not pass verification: {reason}")


def _replay(given: VerifyArguments, proof: Path) -> None:
    """Check a proof and show the result; VerificationFailed, naming the first problem, if it is not true."""
    engine = given.needed_engine()
    report = Engine.open(engine, progress=printing.progress()).replay(proof)
    _hand_over(given, report.to_json(), report.as_text)
    if not report.passed:
        if report.problems:
            raise VerificationFailed(f"{proof} is not true of {engine}: {report.problems[0]}")
        raise VerificationFailed(f"{proof} is not confirmed by {engine}: {report.differences[0]}")


def _hand_over(given: VerifyArguments, report: dict[str, Any], as_text: Callable[[], str]) -> None:
    """Store a report in the file that was asked for, and print it."""
    if given.report_file is not None:
        write_json(given.report_file, report)
    if given.as_json:
        printing.print_json(report)
    else:
        printing.show(as_text())


def _run_tasks(given: VerifyArguments) -> None:
    """Measure how many right answers compression costs, and report it; VerificationFailed where a bar does not hold."""
    progress, asked = printing.progress(), given.asked
    request = AccuracyRequest(
        tasks=asked.tasks,
        lengths=asked.lengths,
        modes=asked.modes,
        framing=asked.framing or PLAIN,
        samples=given.samples,
        data=asked.data,
        truncate=asked.truncate,
        seed=given.seed,
        max_new_tokens=asked.max_new_tokens,
        minimum_accuracy=_share(asked.minimum_accuracy),
        maximum_loss=_share(asked.maximum_loss),
        directory=asked.output_dir,
    )
    if asked.model is None:
        engine = given.needed_engine()
        name, opened = engine.name, open_engine(engine, sealed=given.sealed, progress=progress)
        backend = runner(opened.backend, given.backend)
        report = measure_engine(opened, backend, request, kernels=given.kernels, progress=progress)
    else:
        name = Path(asked.model).name
        report = measure_policies(
            asked.model,
            request,
            policies=asked.policies,
            budgets=asked.budgets,
            weights=asked.weights or "auto",
            checkpoint=None if given.checkpoint is None else str(given.checkpoint),
            progress=progress,
        )
    _hand_over(given, report.to_json(), lambda: _accuracy_text(report, request.directory_for(name)))
    if not report.passed:
        reason = report.failures[0] if report.failures else "no policy applies to any question"
        raise VerificationFailed(f"{name}: {reason}")


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _accuracy_text(report: AccuracyReport, directory: Path) -> str:
    """Return one table per mode and length, then the results that do not count, and the places of the files."""
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
