"""docs/choosing.md: which policy to take for which use, from the answers of the real model, bytes by `plan`, and steps.

    python -m benchmarks.accuracy.smollm2.choosing       # after benchmarks.accuracy.smollm2.steps

Everything follows from the committed results; `benchmarks.accuracy.smollm2.choices` makes the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import store
from benchmarks.accuracy.smollm2 import steps
from benchmarks.accuracy.smollm2.cells import OURS, Answered, Comparison, Group
from benchmarks.accuracy.smollm2.choices import (
    AMONG,
    BESIDE,
    KEPT,
    LATE,
    LONG,
    NATS,
    ONE,
    PLAINLY,
    SHOWN,
    SUMMARY,
    USES,
    Row,
    taken,
)
from benchmarks.accuracy.smollm2.page import recorded
from benchmarks.accuracy.smollm2.stages import BUDGETS, SAMPLES
from benchmarks.accuracy.smollm2.steps import Ratio, Steps
from benchmarks.machine import ROOT
from benchmarks.page import Marks, measured_by, paragraph, table
from kvc_trt.accuracy.grid import Variant
from kvc_trt.policies import BASELINE

PAGE = ROOT / "docs" / "choosing.md"
MARKS = Marks.of("accuracy/smollm2/choosing.py")


def main() -> None:
    """Write the page's measured part."""
    MARKS.replace(PAGE, measured(recorded(), timed()))
    print(PAGE)


def timed() -> Steps:
    """Return the steps that are committed."""
    return Steps.read(store.recorded(steps.NAME, steps.COMMAND))


def measured(found: Comparison, times: Steps) -> str:
    """Return the part of the page between the marks."""
    uses = table(
        ["use", "take", f"right of {SAMPLES}", "whole cache", "MiB", "whole cache", "step, ms", "whole cache",
         "times as fast"],
        [_use(found, times, use, groups) for use, groups in USES.items()],
    )  # fmt: skip
    asked = [*(group.short for group in (ONE, PLAINLY, AMONG, LONG, LATE)), f"{SUMMARY.short}, nats"]
    beside = table(["", "budget", "MiB", "step, ms", "times as fast", *asked], list(_beside(found, times)))
    rule = (
        f"The row to take is the smallest of those that keep {KEPT:.0%} of the questions that the whole cache answers, "
        f"in every group of the use; for a summary, of those that lose at most {NATS} nats a token. Each group has "
        f"{SAMPLES} questions: five more or fewer may be chance. MiB of one sequence are counted by `kvc-trt plan` for "
        "an engine of that length. A cell with several figures has one for each group, in the order of the table below."
    )
    parts = [
        uses, paragraph(rule), paragraph(_how_timed(times)), "## RocketKV beside smaller caches",
        paragraph(_cost(found)), beside,
    ]  # fmt: skip
    return "\n\n".join(parts)


def _how_timed(times: Steps) -> str:
    result = times.result
    rounds, each = result["rounds"], result["steps_of_a_round"]
    measured = measured_by(steps.COMMAND, result["machine"], f"{result['threads']} threads", result["operators"])
    turns = f"took turns of {each} steps in each of {rounds} rounds"
    busy = f"a round in which other work took over {result['busy']:.0%} of the processors does not count"
    return (
        f"A step gives each of {result['rows']} rows one token after a prompt of the longest length. Times are the "
        f"medians of {rounds * each} steps. All engines of a length {turns}; {busy}. *Times as fast* compares with the "
        "whole cache of the same round: the median of the rounds, in brackets their quartiles. A step also reads the "
        f"weights, here in {result['settings']['weights']}, so it gains less than the cache does. Steps: {measured}."
    )


def _use(found: Comparison, times: Steps, use: str, groups: Sequence[Group]) -> list[str]:
    row = taken(found, groups)
    variant = row.variant
    cells = [found.cell(OURS, group, variant.policy, _point(variant)) for group in groups]
    figures = (cells, [found.full(group) for group in groups])
    answers = (" / ".join(_answers(cell) for cell in side) for side in figures)
    sizes = (f"{one.mebibytes:.1f}" for one in (row, row.whole))
    milliseconds = (f"{times.milliseconds(one):.1f}" for one in (row, row.whole))
    named = f"`{variant.policy}`" if variant.token_budget is None else f"`{variant.policy}` at {variant.token_budget}"
    return [use, named, *answers, *sizes, *milliseconds, _ratio(times.ratio(row))]


def _point(variant: Variant) -> str:
    return BASELINE if variant.token_budget is None else f"budget {variant.token_budget}"


def _ratio(ratio: Ratio) -> str:
    if ratio.low == ratio.high:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _answers(cell: Answered | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.mean.value:.2f} nats" if cell.likelihood else f"{round(sum(cell.scores))}"


def _beside(found: Comparison, times: Steps) -> Iterator[list[str]]:
    groups = (ONE, PLAINLY, AMONG, LONG, LATE, SUMMARY)
    for variant in SHOWN:
        cells = [found.cell(OURS, group, variant.policy, _point(variant)) for group in groups]
        rows = [Row.of(variant, group) for group in (ONE, LONG)]
        yield [
            f"`{variant.policy}`",
            "-" if variant.token_budget is None else str(variant.token_budget),
            "; ".join(f"{row.mebibytes:.1f}" for row in rows),
            "; ".join(f"{times.milliseconds(row):.1f}" for row in rows),
            "; ".join(f"{times.ratio(row).median:.2f}" for row in rows),
            *(_answers(cell).removesuffix(" nats") for cell in cells),
        ]


def _cost(found: Comparison) -> str:
    """Return the cost of RocketKV at the least budget beside the other policies, in a sentence for each."""
    budget = BUDGETS[0]
    said = [f"At a budget of {budget}, of the questions that the whole cache answers"]
    for policy in BESIDE:
        kept = []
        for group in (ONE, PLAINLY, AMONG, LONG):
            cell = found.cell(OURS, group, policy, f"budget {budget}")
            share = None if cell is None else found.on_answered(cell)
            kept.append("-" if share is None else f"{100 * share.value:.0f}")
        sizes = [Row.of(Variant(policy, budget), group).mebibytes for group in (ONE, LONG)]
        said.append(f"`{policy}` keeps {', '.join(kept)} % in {sizes[0]:.1f} MiB ({sizes[1]:.1f} at 4,096 tokens);")
    order = f"in the order {'; '.join(group.short for group in (ONE, PLAINLY, AMONG, LONG))}"
    return (
        " ".join(said).removesuffix(";")
        + f", {order}. The table has answers of {SAMPLES}; MiB and steps are at 2,048; 4,096 tokens."
    )


if __name__ == "__main__":
    main()
