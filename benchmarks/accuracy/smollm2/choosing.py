"""docs/choosing.md: which policy to take for which use, from the answers of the real model, bytes and steps by `plan`.

    python -m benchmarks.accuracy.smollm2.choosing

A policy is taken for a use if it has the smallest rows of those that keep KEPT of what the whole cache answers, in
every group of the use. Nothing here depends on who wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import kvc_trt
from benchmarks.accuracy.smollm2 import grid
from benchmarks.accuracy.smollm2.cells import OURS, Answered, Comparison, Group
from benchmarks.accuracy.smollm2.page import recorded
from benchmarks.accuracy.smollm2.stages import BUDGETS, LONGEST_ANSWERS, ROCKETKV, SAMPLES, WIDE_POOL
from benchmarks.machine import ROOT
from benchmarks.page import Marks, paragraph, table
from kvc_trt.accuracy.grid import CHAT, MODES, PLAIN, Variant
from kvc_trt.policies import BASELINE

PAGE = ROOT / "docs" / "choosing.md"
MARKS = Marks.of("accuracy/smollm2/choosing.py")
KEPT = 0.9
"""Share of the whole cache's answers that a choice has to keep."""
NATS = 0.1
"""The most that a choice may lose of a summary's likelihood, per token."""
PROCESSOR, ROWS = "processor=20GB/s,0.5,16", 8
"""Two cores, about, and the rows of a step."""
MIB = 1 << 20
ONE, PLAINLY, AMONG, LONG = (
    Group("niah-single-1", MODES[0], 2048, CHAT),
    Group("niah-single-1", MODES[0], 2048, PLAIN),
    Group("niah-multikey-1-prose", MODES[0], 2048, CHAT),
    Group("niah-single-1", MODES[0], 4096, CHAT),
)
LATE, SUMMARY = Group("niah-single-1", MODES[1], 2048, CHAT), Group("log-summary", MODES[0], 2048, CHAT)
USES = {
    "the prompt asks for one fact of 2,048 tokens": (ONE, PLAINLY),
    "the prompt asks for one fact among similar ones": (AMONG,),
    "the prompt asks for one fact of 4,096 tokens": (LONG,),
    "any of these: through the template, plain, among, long": (ONE, PLAINLY, AMONG, LONG),
    "the question comes after the text was compacted": (LATE,),
    "a text is summarised": (SUMMARY,),
}
BESIDE = (ROCKETKV, WIDE_POOL, "tova", "snapkv++")


@dataclass(frozen=True)
class Row:
    """A policy at one budget, and what a row of it takes at one length."""

    variant: Variant
    group: Group

    @cached_property
    def planned(self) -> dict[str, Any]:
        """The plan of an engine of that length."""
        budget = {} if self.variant.token_budget is None else {"token_budget": self.variant.token_budget}
        lengths = {"max_input_len": self.group.length, "max_output_len": LONGEST_ANSWERS[self.group.task]}
        settings = {"policy": self.variant.name, **self.variant.settings, **budget, **lengths}
        return kvc_trt.plan(grid.MODEL, gpus=[PROCESSOR], **settings)

    @property
    def mebibytes(self) -> float:
        """Of one sequence."""
        return float(self.planned["cache"]["compressed_bytes_per_row"]) / MIB

    @property
    def step(self) -> float:
        """Floor of a step in milliseconds."""
        [floor] = [entry["compressed"]["floor_ms"] for entry in self.planned["speed"] if entry["batch"] == ROWS]
        return float(floor)


def main() -> None:
    """Write the page's measured part."""
    MARKS.replace(PAGE, measured(recorded()))
    print(PAGE)


def measured(found: Comparison) -> str:
    """The part of the page between the marks."""
    uses = table(
        ["use", "take", f"right of {SAMPLES}", "whole cache", "MiB", "whole cache", "step, ms", "whole cache"],
        [_use(found, use, groups) for use, groups in USES.items()],
    )
    beside = table(
        ["", "budget", "MiB", *(group.short for group in (ONE, PLAINLY, AMONG, LONG, LATE)), f"{SUMMARY.short}, nats"],
        list(_beside(found)),
    )
    rule = (
        f"Taken is the smallest row of those that keep {KEPT:.0%} of the questions that the whole cache answers, in "
        f"every group of the use; of a summary, those that lose at most {NATS} nats a token. Each group has {SAMPLES} "
        "questions: five more or fewer may be chance. MiB of one sequence are counted by `kvc-trt plan` for an engine "
        f"of that length. A step is its floor for {ROWS} rows at 20 GB/s, predicted, not measured; most of it is the "
        "weights of so small a model. Several figures are of several groups, in the order of the table below."
    )
    return "\n\n".join([uses, paragraph(rule), "## RocketKV beside smaller caches", paragraph(_cost(found)), beside])


def choice(found: Comparison, groups: Sequence[Group]) -> Variant | None:
    """The policy and budget with the smallest rows that is good enough in all groups; None if only the whole one is."""
    methods = dict.fromkeys(
        (cell.method, cell.point) for cell in found.of(OURS, groups[0]) if len(cell.scores) == SAMPLES
    )
    able = []
    for method, point in methods:
        cells = [found.cell(OURS, group, method, point) for group in groups]
        if all(cell is not None and good_enough(found, cell) for cell in cells):
            able.append((max(cell.stored for cell in cells if cell), Variant(method, int(point.rpartition(" ")[2]))))
    smallest = min(able, key=lambda one: one[0], default=None)
    whole = [full.stored for group in groups if (full := found.full(group))]
    return None if smallest is None or smallest[0] >= max(whole) else smallest[1]


def good_enough(found: Comparison, cell: Answered) -> bool:
    """Whether a cell keeps what it has to."""
    kept, lost = found.on_answered(cell), found.lost(cell)
    if cell.likelihood:
        return lost is not None and lost.value <= NATS
    return kept is not None and kept.value >= KEPT


def _use(found: Comparison, use: str, groups: Sequence[Group]) -> list[str]:
    taken = choice(found, groups) or Variant(BASELINE, None)
    longest = max(groups, key=lambda group: group.length)
    mine, whole = Row(taken, longest), Row(Variant(BASELINE, None), longest)
    point = BASELINE if taken.token_budget is None else f"budget {taken.token_budget}"
    cells = [found.cell(OURS, group, taken.policy, point) for group in groups]
    figures = (cells, [found.full(group) for group in groups])
    answers = (" / ".join(_answers(cell) for cell in side) for side in figures)
    sizes = (f"{one.mebibytes:.1f}" for one in (mine, whole))
    steps = (f"{one.step:.1f}" for one in (mine, whole))
    named = f"`{taken.policy}`" if taken.token_budget is None else f"`{taken.policy}` at {taken.token_budget}"
    return [use, named, *answers, *sizes, *steps]


def _answers(cell: Answered | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.mean.value:.2f} nats" if cell.likelihood else f"{round(sum(cell.scores))}"


def _beside(found: Comparison) -> Iterator[list[str]]:
    groups = (ONE, PLAINLY, AMONG, LONG, LATE, SUMMARY)
    for variant in (Variant(BASELINE, None), *(Variant(policy, budget) for policy in BESIDE for budget in BUDGETS[:2])):
        point = BASELINE if variant.token_budget is None else f"budget {variant.token_budget}"
        cells = [found.cell(OURS, group, variant.policy, point) for group in groups]
        sizes = f"{Row(variant, ONE).mebibytes:.1f}; {Row(variant, LONG).mebibytes:.1f}"
        figures = [_answers(cell).removesuffix(" nats") for cell in cells]
        yield [
            f"`{variant.policy}`",
            "-" if variant.token_budget is None else str(variant.token_budget),
            sizes,
            *figures,
        ]


def _cost(found: Comparison) -> str:
    """What RocketKV costs at the least budget beside the others, in a sentence each."""
    budget = BUDGETS[0]
    said = [f"At a budget of {budget}, of the questions that the whole cache answers"]
    for policy in BESIDE:
        kept = []
        for group in (ONE, PLAINLY, AMONG, LONG):
            cell = found.cell(OURS, group, policy, f"budget {budget}")
            share = cell and found.on_answered(cell)
            kept.append("-" if share is None else f"{100 * share.value:.0f}")
        sizes = [Row(Variant(policy, budget), group).mebibytes for group in (ONE, LONG)]
        said.append(f"`{policy}` keeps {', '.join(kept)} % in {sizes[0]:.1f} MiB ({sizes[1]:.1f} at 4,096 tokens);")
    order = f"in the order {'; '.join(group.short for group in (ONE, PLAINLY, AMONG, LONG))}"
    return (
        " ".join(said).removesuffix(";")
        + f", {order}. The table has answers of {SAMPLES}; MiB are at 2,048; 4,096 tokens."
    )


if __name__ == "__main__":
    main()
