"""The report as one HTML file that needs nothing else: the values that the template `report.html.jinja` shows."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from kvc_trt.accuracy.cell import ENOUGH_ANSWERED, Cell, Mean
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.pages.followed import followed
from kvc_trt.accuracy.pages.published import (
    NOTICEABLE,
    Published,
    PublishedSets,
    method_of,
    paper_order,
    published_sets,
    published_tables,
    summary,
)
from kvc_trt.accuracy.pages.report import AccuracyReport
from kvc_trt.pages.document import render
from kvc_trt.policies import BASELINE
from kvc_trt.sizes import readable_size


def html_page(report: AccuracyReport, figures: Mapping[str, bytes]) -> bytes:
    """The whole report; `figures` are PNG images by file name, shown in their order. Every value is escaped."""
    model, comparisons, tables = (
        str(report.settings.get("model", "model")),
        paper_order(report.cells),
        published_tables(),
    )
    return render(
        "kvc_trt.accuracy.pages",
        "report.html.jinja",
        title=f"Accuracy of KV-cache policies: {model}",
        report=report,
        settings=_settings(report),
        enough=ENOUGH_ANSWERED,
        figures=[(name.removesuffix(".png"), base64.b64encode(image).decode()) for name, image in figures.items()],
        task_tables=[(mode, list(_task_tables(report, mode))) for mode in report.modes],
        followed=followed(report),
        size=readable_size,
        comparisons=comparisons,
        summary=summary(comparisons),
        noticeable=f"{NOTICEABLE:g}",
        answered=_on_answered,
        not_applicable=_not_applicable(report),
        source=tables.source,
        published=[_published_table(report, one) for one in tables.of(model)],
        sets=_published_sets(report, published_sets(), model),
    )


def _settings(report: AccuracyReport) -> list[tuple[str, str]]:
    bars = {name.replace("_", " "): value for name, value in vars(report.bars).items() if value is not None}
    thresholds = ", ".join(f"{name} {value:.1%}" for name, value in bars.items()) or "none"
    settings = [(name.replace("_", " "), _setting(name, value)) for name, value in report.settings.items()]
    return [*settings, ("thresholds", thresholds)]


_NOT_GIVEN = {"max_new_tokens": "the task's own", "samples": "all", "asked": "all"}
"""The word for a setting that is not given, where it is not `none`."""


def _setting(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{part} {_setting(part, one)}" for part, one in value.items() if one is not None)
    return _NOT_GIVEN.get(name, "none") if value is None else str(value)


def _task_tables(report: AccuracyReport, mode: str) -> Iterable[dict[str, Any]]:
    """One table per length and budget: a row per task, a column per policy."""
    for length in report.lengths:
        for budget in (*report.budgets,) or (None,):
            variants = [Variant.of(policy, budget) for policy in report.policies]
            yield {
                "length": length,
                "budget": budget,
                "rows": [
                    (task, [report.cell(report.group(task, mode, length), variant) for variant in variants])
                    for task in report.tasks
                ],
                "averages": [report.average(mode, length, variant) for variant in variants],
            }


def _on_answered(cell: Cell) -> Mean | None:
    """Accuracy on the questions that the full cache answers, where it does not answer all of them."""
    if cell.policy == BASELINE or cell.full_accuracy in (None, 1.0):
        return None
    return cell.on_answered


def _not_applicable(report: AccuracyReport) -> dict[tuple[str, str], list[str]]:
    """Groups of questions by policy and by the reason why it has no engine for them."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in report.not_applicable:
        found.setdefault((str(Variant(cell.policy, cell.token_budget)), cell.reason), []).append(str(cell.group))
    return found


def _published_table(report: AccuracyReport, published: Published) -> dict[str, Any]:
    """The paper's scores, and ours of the same policy and budget where the report has that length."""
    budgets = sorted({budget for row in published.by_policy.values() for budget in row if budget is not None})
    return {
        "benchmark": published.benchmark,
        "length": published.length,
        "budgets": budgets,
        "rows": [
            (policy, [(scores.get(None, scores.get(b)), _ours(report, published.length, policy, b)) for b in budgets])
            for policy, scores in published.by_policy.items()
        ],
    }


def _ours(report: AccuracyReport, length: int | None, policy: str, budget: int) -> Mean | None:
    if length is None or length not in report.lengths:
        return None
    own = next((one for one in report.policies if method_of(one) == policy), policy)
    found = report.average("query-aware", length, Variant.of(own, budget))
    return None if found is None else found[0]


def _published_sets(report: AccuracyReport, published: PublishedSets, model: str) -> dict[str, Any] | None:
    """A paper's scores on the data sets that were asked here, and ours; None for another model or other sets."""
    places = {name: place for place, name in enumerate(published.names) if name in report.tasks}
    rows = published.of(model)
    if not places or not rows:
        return None
    return {
        "source": published.source,
        "names": list(places),
        "rows": [
            (policy, [(scores[place], _ours_of_set(report, name, policy)) for name, place in places.items()])
            for policy, scores in rows.items()
        ],
    }


def _ours_of_set(report: AccuracyReport, name: str, policy: str) -> Mean | None:
    """The policy's score on a set when it has seen the question, whatever the budget beside its own settings."""
    cells = (
        cell
        for cell in report.cells
        if cell.task == name and cell.query_aware and method_of(cell.policy) == policy and cell.scores
    )
    return next((cell.mean for cell in cells if not cell.in_nats), None)
