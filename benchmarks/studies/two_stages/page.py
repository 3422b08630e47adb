"""The page of the study of RocketKV's two stages, written from its records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.page import paragraph, plot, table, written_by
from benchmarks.studies.figures import Stack, stacked
from benchmarks.studies.findings import Estimate, Finding, overview, verdict
from benchmarks.studies.records import Record, measured_on
from benchmarks.studies.study import Study, Written, image
from benchmarks.studies.two_stages import budgets, lengths, own_token, remainders, steps
from benchmarks.studies.two_stages.cells import BUDGETS, HALF, MEMORIES, PUBLISHED, WIDE, Cell, First, Second
from benchmarks.studies.two_stages.measure import BEST, FIELDS, IN, NAME, SINKS, TASK, measure
from benchmarks.studies.two_stages.measured import (
    PLACES,
    Measured,
    alone,
    by_needle,
    derived,
    interval,
    nats,
    nats_over,
    selecting,
    with_stage_2,
)

MOST = MEMORIES[0]
"""Pairs of a memory that equals one of BUDGETS, so that stage 1 alone reads as much as a policy with that budget."""
ROUNDING = 2
"""Pairs that cells of one memory may differ by, since pages divide it with a remainder."""
LIMITS = (0.1, 0.5)
"""Nats of divergence that are near the whole cache, and not far."""


def page(records: Sequence[Record]) -> Written:
    """Write the page."""
    every, records = records, by_needle(records)
    both = [Measured(records, place) for place in PLACES]
    head = records[0]["key"]
    counts = {size: sum(one["key"]["length"] == size for one in records) for size in lengths_of(records)}
    said = ", ".join(f"{count} of about {length:,} tokens" for length, count in counts.items())
    parts = [
        "# Study: where RocketKV should win, and where it does not",
        written_by(f"python -m benchmarks.studies {NAME}"),
        paragraph(
            "[RocketKV](../../policies/rocketkv.md) (arXiv 2502.14051) evicts a part of the prompt and then reads, at "
            "every step, a part of the rest. On SmolLM2 simpler methods answer as well with no more bytes "
            "([accuracy](../accuracy-smollm2.md)). This study attributes what is lost to the two stages. The needle is "
            "asked for in the prompt, so that stage 1 sees the question, or behind it, after stage 1 has chosen. "
            "[Another page](two-stages-long.md) asks a smaller model on 16,384 tokens."
        ),
        overview(
            [
                _kept(both),
                _easier(both),
                _outperforms(both),
                _kernels(both),
                _selections(both),
                _memory(both),
                budgets.last_tokens(both),
            ]
        ),
        paragraph(
            "Differences are means over needles. *Nats* are the divergence of the next token's distribution from the "
            "whole cache's, along the true answer: 0 is the whole cache, and lower is better."
        ),
        "## Where attention is lost",
        plot(image(NAME, "attention"), STUDY.path),
        _losses(both),
        "## Which setting to take",
        *proposal(both),
        *budgets.sections(both, STUDY.path),
        "## Equal bytes in memory",
        plot(image(NAME, "memory"), STUDY.path),
        paragraph(
            "*Alone* is stage 1, which reads all that it keeps. *1/2 read* has pages of 4 tokens, scores them on half "
            "of the channels and attends to half of the tokens. *Divided* is RocketKV's own rule: pages of 2, all "
            "channels, a quarter of the tokens attended. Page bounds count as memory. At "
            "1,024 pairs *1/2 read* and *quarter* also show what [the prompt's last page](#the-prompts-last-page) does."
        ),
        cells_table(both),
        remainders.section(),
        own_token.section(),
        "## By length",
        _by_length(records),
        paragraph(
            "Stage 1 alone with the paper's three kernels (and 17), mean of all memories, in nats with intervals of "
            "95 %:"
        ),
        _kernels_by_length(records),
        steps.section(),
        lengths.section(),
        "## How it was measured",
        paragraph(
            f"{head['model']}, 32-bit floats; {len(records)} needles (task [{TASK}](../../tasks.md)): {said}. One "
            "reading of a prompt serves all cells; steps then choose for themselves (`tests/benchmarks/studies` "
            "compares their logits with the policies'). TOVA keeps what its rule keeps of a prompt, and here drops "
            "nothing while it decodes. Attention is the whole cache's, from the answer's tokens to the prompt but its "
            f"first {SINKS} tokens, and the best tokens are the {BEST} that it favours, per KV head: means over "
            f"layers, "
            "then needles. Needles count as found if every token of the number is the likeliest one. Intervals are a "
            "bootstrap over needles. The paper has models of 7B and 8B parameters, and RULER and LongBench. "
            f"{measured_on(every, NAME)}."
        ),
    ]
    images = {
        image(NAME, "attention"): _attention_plot(both),
        image(NAME, "memory"): _memory_plot(both),
        image(NAME, "budgets"): budgets.picture(both),
    }
    return Written("\n\n".join(parts) + "\n", images)


def lengths_of(records: Sequence[Record]) -> list[int]:
    """Return the lengths of prompts, ascending."""
    return sorted({one["key"]["length"] for one in records})


def _kept(both: Sequence[Measured]) -> Finding:
    own, least = derived("rocketkv", MOST, Second()), alone(PUBLISHED, MOST)
    less = [one.less(own, least, "best_kept") for one in both]
    return Finding(
        'With a larger budget for stage 1, "the chance of permanently evicting important KV tokens is greatly reduced" '
        "(section 3.1)",
        f"of the {BEST} most attended tokens, stage 1 keeps, beside stage 1 with {MOST} tokens: "
        + "; ".join(f"question {one.place} {gain.points()}" for one, gain in zip(both, less, strict=True)),
        less[0].count,
        verdict(*(one.low > 0.05 for one in less)),
    )


def _easier(both: Sequence[Measured]) -> Finding:
    less = [one.less(derived("rocketkv", MOST), selecting("hybrid", MOST)) for one in both]
    return Finding(
        'Selecting among what is left "significantly" lowers "the prediction difficulty" (section 3.1)',
        f"budget {MOST}, beside hybrid attention over the whole prompt: "
        + "; ".join(f"question {one.place} {nats(gain)}" for one, gain in zip(both, less, strict=True)),
        less[0].count,
        verdict(*(one.high < 0 for one in less)),
    )


def _outperforms(both: Sequence[Measured]) -> Finding:
    rivals = {
        "its stage 1 alone": alone(PUBLISHED, MOST), "stage 1 with pool 17": alone(WIDE, MOST),
        "TOVA": alone(First("tova"), MOST), "Quest": selecting("quest-matched", MOST),
        "SparQ": selecting("sparq", MOST),
    }  # fmt: skip
    less = [
        (one.place, name, one.less(derived("rocketkv", MOST), cell)) for one in both for name, cell in rivals.items()
    ]
    return Finding(
        'At an equal token budget RocketKV "consistently outperforms all other methods" (section 4.2)',
        f"budget {MOST} of pairs read: "
        + "; ".join(
            f"question {place}, beside " + ", ".join(f"{name} {nats(gain)}" for at, name, gain in less if at == place)
            for place in PLACES
        ),
        min(gain.count for _, _, gain in less),
        verdict(*(gain.high < 0 for _, _, gain in less)),
    )


def _kernels(both: Sequence[Measured]) -> Finding:
    less = {
        (one.place, kernel): Estimate.of(
            [a - b for a, b in zip(_means_over_memories(one, 63), _means_over_memories(one, kernel), strict=True)]
        )
        for one in both
        for kernel in (7, 511, 17)
    }
    said = "; ".join(
        f"question {place}, beside "
        + ", ".join(f"kernel {kernel} {nats(gain)}" for (at, kernel), gain in less.items() if at == place)
        for place in PLACES
    )
    return Finding(
        "Kernel 63 is best up to 32K tokens, before 7 and 511 (section 4.4.2, figure 7)",
        f"stage 1 alone, mean of {MOST} to {MEMORIES[-1]} pairs (the paper has no kernel 17): {said}",
        less[IN, 7].count,
        verdict(*(gain.high < 0 for (_, kernel), gain in less.items() if kernel != 17)),
    )


def _selections(both: Sequence[Measured]) -> Finding:
    less = {
        (one.place, name, budget): one.less(selecting("hybrid", budget), selecting(policy, budget))
        for one in both
        for name, policy in (("Quest", "quest-matched"), ("SparQ", "sparq"))
        for budget in BUDGETS
    }
    said = "; ".join(
        f"question {place}, beside {name} "
        + ", ".join(f"at {budget} {nats(less[place, name, budget])}" for budget in BUDGETS)
        for place in PLACES
        for name in ("Quest", "SparQ")
    )
    return Finding(
        'Alone, "hybrid attention consistently outperforms Quest and SparQ, especially at low token budgets" '
        "(section 4.4.3, figure 8)",
        f"by token budget: {said}",
        min(gain.count for gain in less.values()),
        verdict(*(gain.high < 0 for gain in less.values())),
    )


def _memory(both: Sequence[Measured]) -> Finding:
    less = [
        (one.place, size, one.less(with_stage_2(PUBLISHED, HALF, size), alone(PUBLISHED, size)))
        for one in both
        for size in MEMORIES
    ]
    return Finding(
        "This project's question: at equal bytes in memory, are both stages better than the first alone?",
        "1/2 read, beside stage 1 alone of the same pool (at 1,024 pairs [the prompt's last "
        "page](#the-prompts-last-page) counts too): "
        + "; ".join(f"question {place}, {size:,} pairs {nats(gain)}" for place, size, gain in less),
        less[0][2].count,
        verdict(*(gain.high < 0 for _, _, gain in less)),
    )


def _losses(both: Sequence[Measured]) -> str:
    said = []
    for one in both:
        own = derived("rocketkv", MOST)
        steps = [derived("rocketkv", MOST, Second()), derived("rocketkv", MOST, Second("exact")), own]
        evicted, fewer, guessed = (interval(one.estimate(cell)) for cell in steps)
        kept, read = one.mean(own, "attention_kept"), one.mean(own, "attention_read")
        said.append(
            f"question {one.place}, {100 * (1 - kept):.0f} % of attention is evicted and {100 * (kept - read):.0f} % "
            f"kept and not read; that is {evicted} nats by eviction, {fewer} if the best tokens of the rest "
            f"are read, and {guessed} with the tokens that page bounds find"
        )
    return paragraph(
        f"Of `rocketkv` at budget {MOST}, {len(both[0].records)} needles, 95 % intervals in brackets: "
        + ". With the ".join(said) + "."
    )  # fmt: skip


def proposal(both: Sequence[Measured]) -> list[str]:
    """Write which settings stay near the whole cache: how they were chosen, their table, and what follows at equal
    bytes."""
    rows = []
    both = [one.under(one.all()) for one in both]
    for one in both:
        cells = {name: [statistics.fmean(column) for column in zip(*values, strict=True)]
                 for name, values in one.all().items() if "| exact" not in name}  # fmt: skip
        for limit in LIMITS:
            near = {name: mean for name, mean in cells.items() if mean[3] <= limit}
            chosen = [fewest(near, at) for at in (0, 1) if near]
            shown = [
                f"{shown_name(name)}: {near[name][0]:,.0f} stored, {near[name][1]:,.0f} read, "
                f"{interval(Estimate.of([values[3] for values in one.all()[name]]))} nats"
                for name in chosen
            ]
            rows.append([one.place, f"{limit}", *(shown or ["none", "none"])])
    return [
        paragraph(
            "The settings that stay near the whole cache with the fewest pairs of a KV head stored, and with the "
            "fewest read, among those that were measured; how near is the divergence that is allowed. The oracle is "
            f"left out. They were chosen by means of the same {len(both[0].records)} needles that their figures are "
            "of, so these are a lower bound of what they lose elsewhere; intervals are of 95 %."
        ),
        table(("question", "nats at most", "fewest stored", "fewest read"), rows),
        paragraph(
            "At equal bytes in memory a step of RocketKV reads a part of fewer tokens than its stage 1 alone would "
            "keep, so there is no reason for it to answer better. What it can win is bytes read: where both columns "
            "name about as many pairs stored, both stages stay as near with fewer reads."
        ),
    ]


def fewest(cells: Mapping[str, Sequence[float]], at: int) -> str:
    """Name the cell with the fewest pairs, FIELDS[at]; of those that rounding alone parts, the one of fewest nats."""
    least = min(values[at] for values in cells.values())
    return min((name for name in cells if cells[name][at] <= least + ROUNDING), key=lambda name: cells[name][3])


def shown_name(name: str) -> str:
    """Return a cell's name in a table."""
    return ", ".join(part.strip() for part in name.split("|"))


def _attention_plot(both: Sequence[Measured]) -> bytes:
    shown = {
        **{f"rocketkv, {budget}": derived("rocketkv", budget) for budget in BUDGETS},
        **{f"hybrid alone, {budget}": selecting("hybrid", budget) for budget in BUDGETS},
        f"1/2 read, {MEMORIES[1]}": with_stage_2(PUBLISHED, HALF, MEMORIES[1]),
        f"stage 1 alone, {MEMORIES[1]}": alone(PUBLISHED, MEMORIES[1]),
        f"TOVA, {MEMORIES[1]}": alone(First("tova"), MEMORIES[1]),
    }
    stacks = [
        Stack(f"question {one.place}", {
            name: (
                one.mean(cell, "attention_read"),
                one.mean(cell, "attention_kept") - one.mean(cell, "attention_read"),
                1 - one.mean(cell, "attention_kept"),
            )
            for name, cell in shown.items()
        })
        for one in both
    ]  # fmt: skip
    parts = ("read", "kept, not read", "evicted")
    title = f"What becomes of the whole cache's attention, mean of {len(both[0].records)} needles"
    return stacked(title, stacks, parts, "share of attention")


def _memory_plot(both: Sequence[Measured]) -> bytes:
    shown: dict[str, Callable[[int], Cell]] = {
        "TOVA": lambda size: alone(First("tova"), size),
        "pool 17, alone": lambda size: alone(WIDE, size),
        "pool 17, 1/2 read": lambda size: with_stage_2(WIDE, HALF, size),
        "pool 63, alone": lambda size: alone(PUBLISHED, size),
        "pool 63, 1/2 read": lambda size: with_stage_2(PUBLISHED, HALF, size),
        "pool 63, divided": lambda size: with_stage_2(PUBLISHED, "divided", size),
    }
    cells = {name: [cell(size) for size in MEMORIES] for name, cell in shown.items()}
    return nats_over(MEMORIES, "pairs stored by a KV head, bounds included", "Equal bytes in memory", cells, both)


def cells_table(both: Sequence[Measured]) -> str:
    """Write all cells, by their memory or budget: pairs stored and read, then by place of the question FIELDS."""
    rows = []
    for name in sorted(both[0].all(), key=lambda one: int(one.rsplit("|", 1)[1])):
        row = [shown_name(name), f"{len(both[0].all()[name])}"]
        for one in both:
            asked = one.under([name])
            values = asked.all()[name]
            known = [each["measured"][one.place]["cells"][name][2] for each in asked.records
                     if each["measured"][one.place]["whole"]]  # fmt: skip
            mean = [statistics.fmean(column) for column in zip(*values, strict=True)]
            if one.place == IN:
                row += [f"{mean[0]:,.0f}", f"{mean[1]:,.0f}"]
            row += [f"{sum(known)}/{len(known)}", f"{mean[3]:.2f}", *(f"{100 * share:.0f}" for share in mean[4:])]
        rows.append(row)
    heads = ["cell", "n", "stored", "read"]
    heads += [f"{name}, {place.split()[0]}" for place in PLACES
              for name in ("found", "nats", "attention kept", "read", "best kept", "read")]  # fmt: skip
    return table(heads, rows)


def _by_length(records: Sequence[Record]) -> str:
    rows = []
    own, first, whole = derived("rocketkv", MOST), alone(PUBLISHED, MOST), selecting("hybrid", MOST)
    for length in lengths_of(records):
        some = [one for one in records if one["key"]["length"] == length]
        for place in PLACES:
            at = Measured(some, place)
            rows.append([
                f"{length:,}", place, str(len(some)), f"{sum(one['measured'][place]['whole'] for one in some)}",
                *(f"{at.mean(cell, 'divergence'):.2f}" for cell in (first, own, whole)),
                *(f"{100 * at.mean(own, name):.0f}" for name in FIELDS[4:]),
            ])  # fmt: skip
    heads = ("tokens", "question", "n", "found by the whole cache", f"stage 1 alone, {MOST}: nats", "rocketkv: nats",
             "hybrid alone: nats", "rocketkv: attention kept, %", "read, %", "best kept, %",
             "best read, %")  # fmt: skip
    return table(heads, rows)


def _kernels_by_length(records: Sequence[Record]) -> str:
    kernels = (7, 17, 63, 511)
    rows = []
    for length in lengths_of(records):
        for place in PLACES:
            at = Measured([one for one in records if one["key"]["length"] == length], place)
            found = [Estimate.of(_means_over_memories(at, kernel)) for kernel in kernels]
            rows.append([f"{length:,}", place, str(found[0].count), *map(interval, found)])
    return table(("tokens", "question", "n", *(f"kernel {kernel}" for kernel in kernels)), rows)


def _means_over_memories(one: Measured, kernel: int) -> list[float]:
    """Return the mean divergence over memories of stage 1 alone, a value for each needle."""
    cells = [alone(First("votes", 32, kernel), size) for size in MEMORIES]
    return [statistics.fmean(sizes) for sizes in zip(*(one.values(each, "divergence") for each in cells), strict=True)]


STUDY = Study(NAME, measure, page)
