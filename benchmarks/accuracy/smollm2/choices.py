"""The policy and budget that are good enough for each use, and the engines that docs/choosing.md shows.

A policy is taken for a use if it has the smallest rows of those that keep the share KEPT of the whole cache's right
answers, in every group of the use. Nothing here depends on who wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import kvc_trt
from benchmarks.accuracy.smollm2 import grid
from benchmarks.accuracy.smollm2.cells import OURS, Answered, Comparison, Group
from benchmarks.accuracy.smollm2.stages import BUDGETS, LONGEST_ANSWERS, ROCKETKV, SAMPLES, WIDE_POOL
from kvc_trt.accuracy.grid import CHAT, MODES, PLAIN, Variant
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.policies import BASELINE

KEPT = 0.9
"""Share of the whole cache's answers that a choice has to keep."""
NATS = 0.1
"""The most that a choice may lose of a summary's likelihood, per token."""
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
WHOLE = Variant(BASELINE, None)
BESIDE = (ROCKETKV, WIDE_POOL, "tova", "snapkv++")
SHOWN = (
    WHOLE,
    *(Variant(policy, budget) for policy in BESIDE for budget in (BUDGETS if policy == WIDE_POOL else BUDGETS[:2])),
)
"""The policies and budgets beside each other; one keeps all budgets, since the preset takes its largest."""


@dataclass(frozen=True)
class Row:
    """A policy at one budget, and the bytes of its row at one length."""

    variant: Variant
    length: int
    """Tokens of the longest prompt."""
    answer: int
    """Tokens of the longest answer."""

    @classmethod
    def of(cls, variant: Variant, group: Group) -> Row:
        """Return the row of an engine that a group's questions fit."""
        return cls(variant, group.length, LONGEST_ANSWERS[group.task])

    @property
    def room(self) -> Room:
        """The lengths of the engine."""
        return Room(self.length, self.answer)

    @property
    def whole(self) -> Row:
        """The row of the whole cache of these lengths."""
        return Row(WHOLE, self.length, self.answer)

    @cached_property
    def planned(self) -> dict[str, Any]:
        """The plan of an engine of that length."""
        budget = {} if self.variant.token_budget is None else {"token_budget": self.variant.token_budget}
        lengths = {"max_input_len": self.length, "max_output_len": self.answer}
        return kvc_trt.plan(grid.MODEL, **{"policy": self.variant.name, **self.variant.settings, **budget, **lengths})

    @property
    def mebibytes(self) -> float:
        """MiB of one sequence's cache."""
        return float(self.planned["cache"]["compressed_bytes_per_row"]) / MIB


def taken(found: Comparison, groups: Sequence[Group]) -> Row:
    """Return the row that is taken for a use, at the longest of its lengths."""
    longest = max(groups, key=lambda group: group.length)
    return Row.of(choice(found, groups) or WHOLE, longest)


def shown(found: Comparison) -> list[Row]:
    """Return every row that the page shows, and the whole cache of the same lengths, each once."""
    beside = [Row.of(variant, group) for group in (ONE, LONG) for variant in SHOWN]
    chosen = [taken(found, groups) for groups in USES.values()]
    return list(dict.fromkeys([*beside, *(one for row in chosen for one in (row.whole, row))]))


def choice(found: Comparison, groups: Sequence[Group]) -> Variant | None:
    """Return the policy and budget with the smallest rows that is good enough in all groups; None if none is."""
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
    """Return True if a cell keeps enough of the whole cache's answers, or loses few enough nats."""
    kept, lost = found.on_answered(cell), found.lost(cell)
    if cell.likelihood:
        return lost is not None and lost.value <= NATS
    return kept is not None and kept.value >= KEPT
