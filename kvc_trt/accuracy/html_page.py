"""The report as one HTML file that needs nothing else: styles and images are inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from kvc_trt.accuracy.cell import EVIDENCE, Cell
from kvc_trt.accuracy.grid import FULL, Group, Variant
from kvc_trt.accuracy.order import NOTICEABLE, paper_order, summary
from kvc_trt.accuracy.published import SOURCE, Published, published_for
from kvc_trt.accuracy.report import AccuracyReport

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 96em; padding: 0 1.5em; color: #1a1a1a }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2.2em; border-bottom: 1px solid #ccc } h3 { font-size: 1em }
table { border-collapse: collapse; margin: .6em 0 1.4em } th, td { border: 1px solid #ddd; padding: .25em .5em }
th { background: #f3f3f3; text-align: left; font-weight: 600 } td { text-align: right; white-space: nowrap }
td.text { text-align: left; white-space: normal } small { display: block; color: #555; font-size: .78em }
img { max-width: 100%; height: auto } .none { color: #777; background: #eee } .weak { opacity: .55 }
summary { font-size: 1.2em; font-weight: 600; margin-top: 1.6em; cursor: pointer }
.bad { color: #8a1c00; font-weight: 600 } .good { color: #00563f; font-weight: 600 } .wide { overflow-x: auto }
"""
_SHADES = "\n".join(f".s{tenth} {{ background: rgba(0, 114, 178, {0.042 * tenth:.3f}) }}" for tenth in range(11))


def html_page(report: AccuracyReport, figures: dict[str, bytes]) -> bytes:
    """The whole report; `figures` are PNG images by file name, shown in their order."""
    title = f"Accuracy of KV-cache policies: {report.settings.get('model', 'model')}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        _summary(report),
        *_figures(figures),
        *_tables(report),
        _order(report),
        _not_learned(report),
        _not_applicable(report),
        _published(report),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_SHADES}</style></head>\n<body>\n{body}\n</body></html>\n"
    ).encode()


def _summary(report: AccuracyReport) -> str:
    bars = {name.replace("_", " "): value for name, value in vars(report.bars).items() if value is not None}
    verdict = '<span class="good">passed</span>' if report.passed else '<span class="bad">failed</span>'
    rows = [
        *((name.replace("_", " "), _setting(value)) for name, value in report.settings.items()),
        ("thresholds", ", ".join(f"{name} {value:.1%}" for name, value in bars.items()) or "none"),
    ]
    reading = (
        "Greedy answers, in percent, ± one standard error, with n questions per cell. <b>Query-aware</b>: the prompt "
        "ends with the question, so compaction has seen it. <b>Query-agnostic</b>: the question arrives after "
        f"compaction, through decode. A cell counts where the full cache answers at least {EVIDENCE:.0%}; others are "
        "pale, and listed as not learned. A token budget is traffic: K+V pairs that one step may read per layer and KV "
        "head."
    )
    failures = "".join(f"<li>{escape(line)}</li>" for line in report.failures)
    return (
        _table(["", ""], [[(name, "text"), (value, "text")] for name, value in rows])
        + f"<p>{reading}</p><p>Result: {verdict}</p>"
        + (f"<ul>{failures}</ul>" if failures else "")
    )


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_setting(one)}" for name, one in value.items() if one is not None)
    return "the task's own" if value is None else str(value)


def _figures(figures: dict[str, bytes]) -> Iterable[str]:
    for name, image in figures.items():
        title = escape(name.removesuffix(".png"))
        data = base64.b64encode(image).decode()
        shown = f'<img alt="{title}" src="data:image/png;base64,{data}">'
        yield f"<details open><summary>{title}</summary>{shown}</details>"


def _tables(report: AccuracyReport) -> Iterable[str]:
    """One table per mode, length and budget: a row per task, a column per policy."""
    for mode in report.modes:
        yield f"<h2>Accuracy by task, {escape(mode)}</h2>"
        for length in report.lengths:
            for budget in (*report.budgets,) or (None,):
                heading = f"{length:,} tokens" + ("" if budget is None else f", token budget {budget:,}")
                yield f"<h3>{heading}, {escape(mode)}</h3>" + _task_table(report, mode, length, budget)


def _task_table(report: AccuracyReport, mode: str, length: int, budget: int | None) -> str:
    variants = [Variant(policy, None if policy == FULL else budget) for policy in report.policies]
    rows = [
        [(task, "text"), *(_cell(report.cell(Group(task, mode, length), variant)) for variant in variants)]
        for task in report.tasks
    ]
    averages = [report.average(mode, length, variant) for variant in variants]
    mean_row = [("mean of the tasks that count", "text")]
    mean_row += [
        ("n/a", "none") if one is None else (f"{one[0]}<small>{one[1]} tasks, n {one[0].samples}</small>", "")
        for one in averages
    ]
    return f'<div class="wide">{_table(["task", *report.policies], [*rows, mean_row], raw=True)}</div>'


def _cell(cell: Cell | None) -> tuple[str, str]:
    if cell is None or not cell.scores:
        return "n/a", "none"
    aware = "aware" if cell.query_aware else "agnostic"
    shade = f"s{round(10 * cell.mean.value)}"
    return f"{cell.mean}<small>n {cell.samples}, {aware}</small>", shade if cell.evidence else f"{shade} weak"


def _order(report: AccuracyReport) -> str:
    comparisons = paper_order(report.cells)
    rows = [
        [
            (f"{one.first} ≥ {one.second}", "text"),
            (one.mode, "text"),
            (f"{one.token_budget:,}", ""),
            (f"{100 * one.difference.value:+.1f} ± {100 * one.difference.standard_error:.1f}", ""),
            (f"{one.difference.samples} in {len(one.groups)} groups", ""),
            (one.verdict, "text " + {"holds": "good", "does not hold": "bad"}.get(one.verdict, "")),
        ]
        for one in comparisons
    ]
    if not rows:
        return ""
    return (
        "<h2>The order of RocketKV's paper</h2><p>First minus second in points, question by question on the same "
        f"questions, over every group that counts; {NOTICEABLE:g} standard errors make a difference.</p>"
        + "".join(f"<p>{escape(line)}</p>" for line in summary(comparisons))
        + _table(["claim", "mode", "token budget", "difference", "questions", ""], rows)
    )


def _not_learned(report: AccuracyReport) -> str:
    rows = [[(str(group), "text"), (f"{full} (n {full.samples})", "")] for group, full in report.not_learned]
    if not rows:
        return ""
    return "<h2>Not learned</h2><p>The full cache itself does not answer these.</p>" + _table(
        ["questions", "full cache"], rows
    )


def _not_applicable(report: AccuracyReport) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in report.not_applicable:
        variant = str(Variant(cell.policy, cell.token_budget))
        reasons.setdefault((variant, cell.reason), []).append(str(cell.group))
    rows = [[(v, "text"), (reason, "text"), ("; ".join(where), "text")] for (v, reason), where in reasons.items()]
    return "<h2>Not applicable</h2>" + _table(["policy", "reason", "questions"], rows) if rows else ""


def _published(report: AccuracyReport) -> str:
    tables = published_for(str(report.settings.get("model")))
    if not tables:
        return ""
    note = f"<p>{escape(SOURCE)}; percentages. Ours are other tasks of the same families, query-aware.</p>"
    return "<h2>Published for this model</h2>" + note + "".join(_published_table(report, one) for one in tables)


def _published_table(report: AccuracyReport, published: Published) -> str:
    budgets = sorted({b for row in published.by_policy.values() for b in row if b is not None})
    rows = []
    for policy, scores in published.by_policy.items():
        row = [(policy, "text")]
        for budget in budgets:
            theirs = scores.get(None, scores.get(budget))
            ours = _ours(report, published, policy, budget)
            row.append(
                ("n/a" if theirs is None else f"{theirs:g}" + (f"<small>here {ours}</small>" if ours else ""), "")
            )
        rows.append(row)
    at = "" if published.length is None else f", {published.length:,} tokens"
    return f"<h3>{escape(published.benchmark)}{at}</h3>" + _table(["policy", *map(str, budgets)], rows, raw=True)


def _ours(report: AccuracyReport, published: Published, policy: str, budget: int) -> str:
    if published.length not in report.lengths:
        return ""
    found = report.average("query-aware", published.length or 0, Variant(policy, None if policy == FULL else budget))
    return "" if found is None else str(found[0])


def _table(headers: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]], *, raw: bool = False) -> str:
    """Rows of (content, class); `raw` content is HTML already, except in cells of text."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers) if any(headers) else ""
    lines = [f"<tr>{head}</tr>"] if head else []
    for row in rows:
        cells = (
            f'<td class="{kind}">{content if raw and "text" not in kind else escape(content)}</td>'
            for content, kind in row
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"
