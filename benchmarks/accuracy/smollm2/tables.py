"""The one table of docs/results/accuracy-smollm2.md, and everything that is known as CSV beside it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import page
from benchmarks.accuracy.paired import difference
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, methods
from benchmarks.accuracy.smollm2.comparisons import beside_policies, beside_presses
from benchmarks.accuracy.smollm2.stages import BUDGETS
from kvc_trt.accuracy.cell import interval
from kvc_trt.policies import BASELINE

MIB = 1 << 20
PLACE = ("task", "mode", "length", "framing")
CELLS = (
    "engine", *PLACE, "method", "point", "stored_bytes", "questions", "mean", "low", "high", "standard_error",
    "minus_whole_cache", "minus_whole_cache_error", "of_its_answers", "of_its_answers_low", "of_its_answers_high",
    "its_answers", "reason",
)  # fmt: skip
"""Columns of the cells. `mean` is a share of the questions with Wilson's 95 % interval, or nats a token. Those from
`minus_whole_cache` on compare with the same engine's whole cache; `its_answers` is how many questions that answers."""
COMPARISONS = (
    *PLACE, "policy", "policy_point", "policy_bytes", "engine", "method", "point", "bytes", "equal", "questions",
    "difference", "standard_error", "verdict",
)  # fmt: skip
"""Columns of the comparisons; `difference` is the policy's score minus the other's, question by question."""


def cells(found: Comparison) -> str:
    """Return every cell of both engines, and the reasons of those that there cannot be."""
    rows = [_row(found, cell) for cell in found.cells]
    for group, policy, budget, reason in found.absent:
        point = BASELINE if budget is None else f"budget {budget}"
        head = (OURS, *group, policy, point)
        rows.append((*head, *[None] * (len(CELLS) - len(head) - 1), reason))
    return page.cells(CELLS, rows)


def _row(found: Comparison, cell: Answered) -> tuple[object, ...]:
    low, high = (None, None) if cell.likelihood else cell.interval
    lost, kept = found.lost(cell), found.on_answered(cell)
    of_low, of_high = (None, None) if kept is None else interval(kept.value, kept.samples)
    return (
        cell.side, *cell.group, cell.method, cell.point, cell.stored, len(cell.scores), cell.mean.value, low, high,
        cell.mean.standard_error, lost and lost.value, lost and lost.standard_error, kept and kept.value, of_low,
        of_high, kept and kept.samples, None,
    )  # fmt: skip


def comparisons(found: Comparison) -> str:
    """Return every comparison that is made, with its verdict."""
    rows: list[tuple[object, ...]] = []
    for group in found.groups:
        for row in (*beside_policies(found, group), *beside_presses(found, group)):
            other, mine = row.other, row.mine
            gained = None if other is None else difference(mine.scores, other.scores)
            rows.append(
                (
                    *group, mine.method, mine.point, mine.stored, other and other.side, row.method, row.point,
                    other and other.stored, row.alike, gained and gained.samples, gained and gained.value,
                    gained and gained.standard_error, row.verdict or row.reason,
                )
            )  # fmt: skip
    return page.cells(COMPARISONS, rows)


def overview(found: Comparison) -> str:
    """Return a row per method, with a figure for each budget; a column per group that policies were asked."""
    groups = [group for group in found.groups if found.of(OURS, group)]
    lengths = sorted({group.length for group in groups})
    heads = ["method", *(f"MiB, {length:,} tokens" for length in lengths), *(_head(group) for group in groups)]
    full = [[one for group in groups if (one := found.full(group)) and group.length == length] for length in lengths]
    rows = [["whole cache", *map(_largest, full), *(_whole(found.full(group)) for group in groups)]]
    for side, prefix in ((OURS, ""), (KVPRESS, "kvpress ")):
        for method in methods([cell for group in groups for cell in found.of(side, group)]):
            at = [[found.cell(side, group, method, f"budget {budget}") for group in groups] for budget in BUDGETS]
            sizes = [
                [_largest([cell for cell in cells if cell and cell.group.length == length]) for cells in at]
                for length in lengths
            ]
            figures = [[_figure(found, cell) for cell in cells] for cells in zip(*at, strict=True)]
            rows.append([f"{prefix}`{method}`", *map(page.together, (*sizes, *figures))])
    return page.table(heads, rows)


def _head(group: Group) -> str:
    return f"{group.short}, {'nats above' if group.task == 'log-summary' else '%'}"


def _largest(cells: Sequence[Answered]) -> str:
    """MiB of the largest: they differ by the room of the answers."""
    return f"{max(cell.stored for cell in cells) / MIB:.1f}" if cells else "-"


def _whole(cell: Answered | None) -> str:
    return "-" if cell is None else f"{cell.mean.value:.2f} nats" if cell.likelihood else f"{100 * cell.mean.value:.0f}"


def _figure(found: Comparison, cell: Answered | None) -> str:
    """Percent, or nats above the whole cache."""
    lost = None if cell is None else found.lost(cell)
    if cell is None or lost is None:
        return "-"
    return f"{lost.value:.2f}" if cell.likelihood else f"{100 * cell.mean.value:.0f}"
