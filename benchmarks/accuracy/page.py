"""docs/results/accuracy.md and its CSV file: the measured part is written from the result alone.

python -m benchmarks.accuracy.page
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.page import DOCS, IMAGES, Marks, cells, measured_by, paragraph, plot, reasons, table, together
from kvc_trt.accuracy.cell import Mean
from kvc_trt.accuracy.pages.published import NOTICEABLE, Comparison, summary
from kvc_trt.files.atomic import write_whole
from kvc_trt.policies import BASELINE

MODEL = "retrieval-text"
NAME = f"accuracy-{MODEL}"
PAGE, CELLS = DOCS / "accuracy.md", DOCS / "accuracy.csv"
MARKS = Marks.of("accuracy")
DRAWN = ("budget", "tasks", "depth-niah-single-1")
"""Figures of the page, by the beginning of their names; the report in build/accuracy/ holds all."""
COLUMNS = (
    "task", "mode", "length", "policy", "token_budget", "row_bytes", "samples", "accuracy", "standard_error",
    "evidence", "reason",
)  # fmt: skip
"""Columns of the CSV file, which are fields of a result's cells; `evidence` is true if the cell counts."""

TAKEN = 1
"""Degrees of freedom that `kvc_trt.accuracy.cell.mean` takes from a deviation; it took none before results said so."""
Cell = Mapping[str, Any]


def main() -> None:
    """Write the page of the committed result."""
    print(write(store.recorded(NAME, "make bench-accuracy")))


def write(result: Mapping[str, Any]) -> Path:
    """Write the measured part, and the cells beside the page."""
    MARKS.replace(PAGE, measured(result))
    write_whole(CELLS, csv_of(result).encode())
    return PAGE


def csv_of(result: Mapping[str, Any]) -> str:
    """Return every cell as CSV."""
    return cells(COLUMNS, ([cell.get(name) for name in COLUMNS] for cell in result["cells"]))


def measured(result: Mapping[str, Any]) -> str:
    """Return the text between the marks of the page."""
    modes = list(dict.fromkeys(cell["mode"] for cell in result["cells"]))
    images = [IMAGES / f"accuracy-{kind}-{mode}.png" for mode in modes for kind in DRAWN]
    parts = [
        _head(result),
        "\n".join(plot(path, PAGE) for path in images),
        *(part for mode in modes for part in _means(result["cells"], mode, result.get("degrees_taken", 0))),
        *_order(result["order"]),
        *_rest(result["cells"]),
    ]
    return "\n\n".join(parts)


def _head(result: Mapping[str, Any]) -> str:
    settings, record, spent = result["settings"], result["machine"], result["spent"]
    rooms = ", ".join(f"{task} {room}" for task, room in settings["max_new_tokens"].items())
    return paragraph(
        f"{measured_by('python -m benchmarks.accuracy', record, str(record['usable_cores']) + ' cores')}; "
        f"{spent['processor_seconds']:,} s of processor time. Model {settings['model']} ({settings['weights']}), "
        f"{settings['samples']} questions per task, length and mode, seed {settings['seed']}, greedy; longest answers "
        f"in tokens: {rooms}. Figures are percent ± one standard error (number of questions); "
        "[accuracy.csv](accuracy.csv) has every task. A task counts where the full cache answers enough of it."
    )


def _means(found: Sequence[Cell], mode: str, taken: int) -> Iterator[str]:
    """Yield a row per policy: the bytes that it stores, and a column per length and budget."""
    here = [cell for cell in found if cell["mode"] == mode]
    lengths = sorted({cell["length"] for cell in here})
    budgets = sorted({cell["token_budget"] for cell in here if "token_budget" in cell})
    heads = ["policy", *(f"KiB stored, {length:,} tokens" for length in lengths)]
    heads += [f"{length:,} tokens, t = {budget}" for length in lengths for budget in budgets]
    rows = []
    for policy in dict.fromkeys(cell["policy"] for cell in here):
        places = {
            (length, budget): [
                cell
                for cell in here
                if (cell["policy"], cell["length"]) == (policy, length)
                and cell.get("token_budget") == (None if policy == BASELINE else budget)
            ]
            for length in lengths
            for budget in budgets
        }
        stored = [together([_kib(places[length, budget]) for budget in budgets]) for length in lengths]
        rows.append([f"`{policy}`", *stored, *(_mean(one, taken) for one in places.values())])
    yield f"## Mean over the tasks that count, {mode}"
    yield table(heads, rows)


def _kib(found: Sequence[Cell]) -> str:
    """Return the KiB of a row for the task with the longest answers, as text."""
    sizes = [cell["row_bytes"] for cell in found if "row_bytes" in cell]
    return f"{max(sizes) / 1024:,.0f}" if sizes else "n/a"


def _mean(found: Sequence[Cell], taken: int) -> str:
    """Return the mean over all questions of the tasks that count; "n/a" if one of these tasks has no answer."""
    counted = [cell for cell in found if cell["evidence"]]
    if not counted or not all("accuracy" in cell for cell in counted):
        return "n/a"
    pooled = pool([Mean(cell["accuracy"], cell["standard_error"], cell["samples"]) for cell in counted], taken)
    return f"{pooled} ({pooled.samples})"


def pool(means: Sequence[Mean], taken: int) -> Mean:
    """Return the mean of all scores that some means were taken of, and its standard error.

    `taken` is the number that the divisor of deviations was less than the number of scores: TAKEN, or 0 in results
    without it.
    """
    count = sum(one.samples for one in means)
    value = math.fsum(one.value * one.samples for one in means) / count
    within = math.fsum(one.standard_error**2 * one.samples * (one.samples - taken) for one in means)
    between = math.fsum(one.samples * (one.value - value) ** 2 for one in means)
    return Mean(value, math.sqrt((within + between) / max(1, count - taken) / count), count)


def _order(order: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = [
        Comparison(
            one["first"], one["second"], one["mode"], one["token_budget"],
            Mean(one["difference"], one["standard_error"], one["questions"]), (),
        )
        for one in order
    ]  # fmt: skip
    yield "## The order of the paper"
    yield paragraph(
        "First minus second, in points, on the same questions of every group that counts and that both answered; a "
        f"difference below {NOTICEABLE:g} standard errors counts as equal."
    )
    yield "\n".join(f"- {line}" for line in summary(found))
    budgets = sorted({one.token_budget for one in found})
    for mode in dict.fromkeys(one.mode for one in found):
        rows = []
        for claim in dict.fromkeys((one.first, one.second) for one in found):
            asked = {one.token_budget: one for one in found if (one.first, one.second, one.mode) == (*claim, mode)}
            rows.append([f"`{claim[0]}` >= `{claim[1]}`", *(_comparison(asked.get(budget)) for budget in budgets)])
        yield table([mode, *(f"t = {budget}" for budget in budgets)], rows)


def _comparison(one: Comparison | None) -> str:
    if one is None:
        return "n/a"
    # Two digits, as in the result: rounding a rounded number once more to one digit may be wrong.
    difference = f"{100 * one.difference.value:+.2f} ± {100 * one.difference.standard_error:.2f}"
    return f"{difference} ({one.difference.samples}): {one.verdict}"


def _rest(found: Sequence[Cell]) -> Iterator[str]:
    lines = [
        f"- {cell['task']}, {cell['length']} tokens, {cell['mode']}: the full cache answers "
        f"{Mean(cell['accuracy'], cell['standard_error'], cell['samples'])} %"
        for cell in found
        if cell["policy"] == BASELINE and not cell["evidence"]
    ]
    if lines:
        yield "## Tasks that the model has not learned\n\n" + "\n".join(lines)
    why: dict[str, str] = {}
    for cell in (one for one in found if "reason" in one):
        why.setdefault(f"`{cell['policy']} {cell['token_budget']}`", cell["reason"])
    yield from reasons(f"{variant}: {reason}" for variant, reason in why.items())


if __name__ == "__main__":
    main()
