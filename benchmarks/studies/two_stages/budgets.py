"""The part of the page about policies at equal token budgets: ways to select, divisions between stages, last tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page import paragraph, plot, table
from benchmarks.studies.findings import Estimate, Finding, verdict
from benchmarks.studies.study import image
from benchmarks.studies.two_stages.cells import (
    ADAPTIVE,
    ALIKE,
    AT_LENGTHS,
    BUDGETS,
    BY_LENGTH,
    EVEN,
    HALF,
    LONGEST,
    MEMORIES,
    PUBLISHED,
    RECENT,
    Cell,
    recent,
)
from benchmarks.studies.two_stages.measure import NAME
from benchmarks.studies.two_stages.measured import (
    Measured,
    derived,
    interval,
    nats,
    nats_over,
    selecting,
    with_stage_2,
)

POLICIES = (ADAPTIVE, EVEN, "hybrid", "quest-matched", "sparq", "exact-topk-group")
SLIGHT = 0.01
"""Nats that do not count as worse."""
PAGED = (ADAPTIVE, "hybrid", "quest-matched")
"""Policies that select by pages, and so may leave out the newest one."""


def cell_of(policy: str, budget: int) -> Cell:
    """Return the cell of a policy."""
    return derived(policy, budget) if policy in (ADAPTIVE, EVEN) else selecting(policy, budget)


def sections(both: Sequence[Measured], page: Path) -> list[str]:
    """Write the sections."""
    return [
        "## Equal token budgets",
        plot(image(NAME, "budgets"), page),
        paragraph(
            "A budget is the number of pairs that a step reads, those that find the tokens included. `hybrid`, "
            "`quest-matched` and `sparq` keep the whole prompt; `exact-topk-group` is an oracle, which reads every "
            f"key beside its budget. `{EVEN}` divides the budget evenly between the stages, as the paper; "
            f"`{ADAPTIVE}` by a later rule of its authors."
        ),
        _policies_table(both),
        "## Divisions between the stages",
        paragraph(
            f"Budget {AT_LENGTHS}. The first two are of an engine for prompts of just this length; the others of one "
            f"for prompts of up to {LONGEST:,} tokens, which keeps of a shorter prompt what the rule says for its own "
            "length (*by length*, the default), or what it says for the longest one (*all alike*)."
        ),
        _divisions_table(both),
        "## Last tokens that are read in any case",
        paragraph(
            f"`--set recent={RECENT}` beside none, which is the paper's rule, at equal bytes stored and read: nats, "
            "mean over needles. A step may leave out [its own token](#whether-a-step-reads-its-own-token) otherwise."
        ),
        _last_tokens_table(both),
    ]


def _asked(both: Sequence[Measured]) -> list[Measured]:
    """Return the needles that were asked for under all policies and budgets, and with last tokens."""
    cells = [cell_of(policy, budget) for policy in POLICIES for budget in BUDGETS]
    names = [cell.name for cell in (*cells, *(recent(selecting("hybrid", budget)) for budget in BUDGETS))]
    return [one.under(names) for one in both]


def _policies_table(both: Sequence[Measured]) -> str:
    both, rows = _asked(both), []
    for policy in POLICIES:
        for budget in BUDGETS:
            cell = cell_of(policy, budget)
            stored, read = (f"{both[0].mean(cell, name):,.0f}" for name in ("stored", "read"))
            said = (part for one in both for part in (_share_found(one, cell), interval(one.estimate(cell))))
            rows.append([f"`{policy}`", str(budget), str(len(both[0].records)), stored, read, *said])
    heads = ("policy", "budget", "n", "stored", "read", *(f"{name}, {one.place.split()[0]}" for one in both
                                                    for name in ("found", "nats")))  # fmt: skip
    return table(heads, rows)


def _share_found(one: Measured, cell: Cell) -> str:
    """Count the needles found among those that the whole cache finds."""
    hits = one.values(cell, "found")
    return f"{sum(hits):.0f}/{len(hits)}"


def _divisions_table(both: Sequence[Measured]) -> str:
    settings = (ADAPTIVE, EVEN, *(f"{name}, {kind}" for name in (ADAPTIVE, EVEN) for kind in (BY_LENGTH, ALIKE)))
    both = [one.under(derived(setting, AT_LENGTHS).name for setting in settings) for one in both]
    rows, own = [], derived(ADAPTIVE, AT_LENGTHS)
    for setting in settings:
        cell = derived(setting, AT_LENGTHS)
        stored, read = (f"{both[0].mean(cell, name):,.0f}" for name in ("stored", "read"))
        said = (part for one in both for part in (interval(one.estimate(cell)), nats(one.less(cell, own))))
        rows.append([setting, str(len(both[0].records)), stored, read, *said])
    heads = ("setting", "n", "stored", "read", *(f"{name}, {one.place.split()[0]}" for one in both
                                           for name in ("nats", f"beside `{ADAPTIVE}`")))  # fmt: skip
    return table(heads, rows)


def with_and_without() -> dict[str, tuple[Cell, Cell]]:
    """Return by name the pairs of cells that differ in the last tokens alone."""
    found = {f"`{policy}`, {budget}": cell_of(policy, budget) for policy in PAGED for budget in BUDGETS}
    found |= {f"1/2 read, {size:,} pairs": with_stage_2(PUBLISHED, HALF, size) for size in MEMORIES}
    return {name: (recent(cell), cell) for name, cell in found.items()}


def _last_tokens_table(both: Sequence[Measured]) -> str:
    rows = []
    for name, (own, none) in with_and_without().items():
        asked = [one.under([own.name, none.name]) for one in both]
        row = [name, str(len(asked[0].records))]
        for one in asked:
            row += [interval(one.estimate(none)), interval(one.estimate(own)), nats(one.less(own, none)),
                    _share_found(one, none), _share_found(one, own)]  # fmt: skip
        rows.append(row)
    heads = [f"{name}, {one.place.split()[0]}" for one in both
             for name in ("none", f"recent {RECENT}", "difference", "found, none", "found")]  # fmt: skip
    return table(("setting", "n", *heads), rows)


def last_tokens(both: Sequence[Measured]) -> Finding:
    """Return the finding about this project's proposal."""
    means = {}
    for one in both:
        pairs = [one.differences(own, none) for own, none in with_and_without().values()]
        means[one.place] = Estimate.of([statistics.fmean(column) for column in zip(*pairs, strict=True)])
    worse = [
        f"{name}, question {one.place} {nats(gain)}"
        for one in both
        for name, (own, none) in with_and_without().items()
        for gain in (one.less(own, none),)
        if gain.low > 0 and gain.mean > SLIGHT
    ]
    return Finding(
        f"This project's proposal: a step reads its last {RECENT} tokens in any case, at equal bytes",
        f"mean of {len(with_and_without())} settings: "
        + "; ".join(f"question {place} {nats(gain)}" for place, gain in means.items())
        + f"; worse by more than {SLIGHT:g} nats: {'; '.join(worse) or 'none'}",
        means[both[0].place].count,
        verdict(*(gain.high < 0 for gain in means.values()), not worse),
    )


def picture(both: Sequence[Measured]) -> bytes:
    """Draw nats over budgets, a line for each policy, and one for hybrid attention with last tokens."""
    both = _asked(both)
    shown = {name: [cell_of(name, budget) for budget in BUDGETS] for name in POLICIES}
    shown[f"hybrid, recent {RECENT}"] = [recent(cell) for cell in shown["hybrid"]]
    return nats_over(BUDGETS, "token budget: pairs read by a step", "Equal token budgets", shown, both)
