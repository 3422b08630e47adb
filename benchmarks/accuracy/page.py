"""docs/results/accuracy.md: the measured part, written between two marks; the text around them is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvc_trt.accuracy.cell import ENOUGH_ANSWERED
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.pages.published import NOTICEABLE, Comparison, paper_order, summary
from kvc_trt.accuracy.pages.report import AccuracyReport
from kvc_trt.atomic_files import write_whole
from kvc_trt.policies import BASELINE

BEGIN, END = "<!-- measured: begin (benchmarks/accuracy writes this part) -->", "<!-- measured: end -->"


def write(
    page: Path, report: AccuracyReport, images: Sequence[Path], record: Mapping[str, Any], spent: Mapping[str, Any]
) -> Path:
    """Replace the text between the marks, which the page must have."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"error: {page} has no marks {BEGIN} ... {END}")
    parts = [
        _head(report, record, spent),
        *_figures(images),
        *_means(report),
        *_order(report),
        *_tasks(report),
        *_rest(report),
    ]
    text = "\n\n".join([BEGIN, *parts, END])
    write_whole(page, f"{before}{text}{after}".encode())
    return page


def _head(report: AccuracyReport, record: Mapping[str, Any], spent: Mapping[str, Any]) -> str:
    settings, versions = report.settings, record["versions"]
    rooms = ", ".join(f"{task} {room}" for task, room in settings["max_new_tokens"].items())
    return "\n".join(
        [
            f"`python -m benchmarks.accuracy`, commit {record['commit']}, kvc-trt {versions['kvc_trt']}, ONNX Runtime "
            f"{versions['onnxruntime']}, {record['device']}, {record['usable_cores']} cores; "
            f"{spent['processor_seconds']:,} s of processor time.",
            f"Model {settings['model']} ({settings['weights']}), {settings['samples']} questions per task, length and "
            f"mode, seed {settings['seed']}, greedy; longest answers in tokens: {rooms}.",
            f"Cells are percent ± one standard error (questions). Cells count where the full cache answers at least "
            f"{ENOUGH_ANSWERED} questions.",
        ]
    )


def _figures(images: Sequence[Path]) -> Iterable[str]:
    for path in images:
        yield f"![{path.stem}](../images/{path.name})"


def _means(report: AccuracyReport) -> Iterable[str]:
    for mode in report.modes:
        yield f"## Mean over the tasks that count, {mode}"

        def mean(length: int, variant: Variant, mode: str = mode) -> str:
            found = report.average(mode, length, variant)
            return "n/a" if found is None else f"{found[0]} ({found[0].samples})"

        yield _table(report, mean)


def _tasks(report: AccuracyReport) -> Iterable[str]:
    for mode in report.modes:
        for task in report.tasks:

            def one(length: int, variant: Variant, mode: str = mode, task: str = task) -> str:
                cell = report.cell(QuestionGroup(task, mode, length), variant)
                if cell is None or not cell.scores:
                    return "n/a"
                return f"{cell.mean} ({cell.samples})" + ("" if cell.evidence else " not learned")

            yield f"<details><summary>{task}, {mode}</summary>\n\n{_table(report, one)}\n\n</details>"


def _table(report: AccuracyReport, cell: Any) -> str:
    """A row per policy, a column per length and budget."""
    columns = [(length, budget) for length in report.lengths for budget in report.budgets]
    lines = [
        "| policy | " + " | ".join(f"{length:,} tokens, t = {budget}" for length, budget in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for policy in report.policies:
        cells = [cell(length, Variant(policy, None if policy == BASELINE else budget)) for length, budget in columns]
        lines.append(f"| `{policy}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _order(report: AccuracyReport) -> Iterable[str]:
    comparisons = paper_order(report.cells)
    yield "## The order of the paper"
    yield (
        "First minus second, in points, on the same questions of every group that counts and that both answered; a "
        f"difference below {NOTICEABLE:g} standard errors is none."
    )
    yield "\n".join(f"- {line}" for line in summary(comparisons))
    for mode in report.modes:
        lines = [
            f"| {mode} | " + " | ".join(f"t = {budget}" for budget in report.budgets) + " |",
            "|---" * (1 + len(report.budgets)) + "|",
        ]
        for claim in dict.fromkeys((one.first, one.second) for one in comparisons):
            found = {
                one.token_budget: one for one in comparisons if (one.first, one.second, one.mode) == (*claim, mode)
            }
            cells = [_comparison(found.get(budget)) for budget in report.budgets]
            lines.append(f"| `{claim[0]}` >= `{claim[1]}` | " + " | ".join(cells) + " |")
        yield "\n".join(lines)


def _comparison(one: Comparison | None) -> str:
    if one is None:
        return "n/a"
    difference = f"{100 * one.difference.value:+.1f} ± {100 * one.difference.standard_error:.1f}"
    return f"{difference} ({one.difference.samples}): {one.verdict}"


def _rest(report: AccuracyReport) -> Iterable[str]:
    if report.not_learned:
        lines = [f"- {group}: the full cache answers {full} %" for group, full in report.not_learned]
        yield "## Not learned\n\n" + "\n".join(lines)
    reasons: dict[str, None] = {}
    for cell in report.not_applicable:
        reasons.setdefault(f"- `{Variant(cell.policy, cell.token_budget)}`: {cell.reason}")
    if reasons:
        yield "<details><summary>Why n/a</summary>\n\n" + "\n".join(reasons) + "\n\n</details>"
