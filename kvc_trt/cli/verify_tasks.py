"""`kvc-trt verify --level tasks`: its own options, and the measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from cloup import option, option_group

from kvc_trt.cli import printing
from kvc_trt.cli.option_types import CountOrByName, Counts, Names
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

if TYPE_CHECKING:
    from kvc_trt.accuracy.cell import Cell
    from kvc_trt.accuracy.pages.report import AccuracyReport

_PERCENT = click.FloatRange(0, 100)
options = option_group(
    "Options of --level tasks",
    option("--model", metavar="NAME|DIR", help="A model in place of ENGINE; needs no engine to be built."),
    option("--policies", type=Names(), help="With --model.  [default: all]"),
    option("--budgets", type=Counts(), help="With --model: token budgets.  [default: the preset's, x2, x4]"),
    option(
        "--weights", type=click.Choice(["fp32", "fp16", "int8", "int4", "keep"]),
        help="With --model: stored weights.  [default: fp32, where it fits]",
    ),
    option("--tasks", type=Names(), help="What to ask (`kvc-trt tasks`).  [default: needles and lines]"),
    option("--lengths", type=Counts(), help="Tokens of prompt and answer.  [default: longest, /2, /4]"),
    option("--modes", type=Names(), help="query-aware, query-agnostic, stored-context, ...  [default: first two]"),
    option("--framing", type=click.Choice(["plain", "chat"]), help="chat: by the template.  [default: plain]"),
    option(
        "--max-new-tokens", type=CountOrByName(), metavar="N|TASK=N,..",
        help="Longest answer, of all tasks or by task.  [default: each task's own]",
    ),
    option("--minimum-accuracy", type=_PERCENT, help="Percent of what the full cache answers."),
    option("--maximum-loss", type=_PERCENT, help="Points that none may lose against it, on all."),
    option(
        "--output-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
        help="Results, kept cell by cell, and the report.  [default: accuracy/NAME]",
    ),
)  # fmt: skip
_ENGINE_HAS = ("policies", "budgets", "weights")


def refuse(given: Mapping[str, Any], level: str) -> None:
    """Refuse options of this level at another."""
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --level tasks, found --level {level}")


def run(engine: Path | None, file: Path | None, as_json: bool, **given: Any) -> None:
    """Measure, write the report, print it; VerificationFailed where a bar does not hold."""
    from kvc_trt.accuracy.grid import PLAIN
    from kvc_trt.accuracy.request import SAMPLES, AccuracyRequest, measure_engine, measure_policies
    from kvc_trt.atomic_files import check_new_file, write_json
    from kvc_trt.backends.registry import open_engine, runner
    from kvc_trt.errors import VerificationFailed

    _check_combination(engine, given)
    if file is not None:
        check_new_file(file, replace=True)
    progress = printing.progress()
    asked = AccuracyRequest(
        tasks=given["tasks"],
        lengths=given["lengths"],
        modes=given["modes"],
        framing=given["framing"] or PLAIN,
        samples=given["samples"] or SAMPLES,
        seed=given["seed"],
        max_new_tokens=given["max_new_tokens"],
        minimum_accuracy=_share(given["minimum_accuracy"]),
        maximum_loss=_share(given["maximum_loss"]),
        directory=given["output_dir"],
    )
    if engine is not None:
        name, opened = engine.name, open_engine(engine, progress=progress)
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
        click.echo(_accuracy_text(report, asked.directory_for(name)))
    if not report.passed:
        reason = report.failures[0] if report.failures else "no policy applies to any question"
        raise VerificationFailed(f"{name}: {reason}")


def _check_combination(engine: Path | None, given: Mapping[str, Any]) -> None:
    from kvc_trt.backends.registry import backends, program_backend

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
        f"percent ± standard error, n = {settings['samples']} per cell, seed {settings['seed']}"
    )


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
    if cell.scored_by != "answer":
        return cell.figure
    kept = cell.on_answered if cell.policy != "full" and cell.full_accuracy != 1 else None
    answered = "" if kept is None else f" ({100 * kept.value:.0f} of {kept.samples})"
    return cell.figure + answered + ("" if cell.evidence else " *")


def _notes(report: AccuracyReport) -> Iterable[str]:
    from kvc_trt.accuracy.cell import ENOUGH_ANSWERED
    from kvc_trt.accuracy.grid import Variant

    if report.not_learned:
        few = f"the full cache answers fewer than {ENOUGH_ANSWERED} questions"
        yield f"* not learned: {few}, and the cell does not count"
    if any(cell.full_accuracy not in (None, 1.0) for cell in report.cells):
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
