"""The page of the studies of pooling, windows and needles, written from their records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.page import paragraph, plot, table, written_by
from benchmarks.studies.figures import LineAxes, Map, MapAxes, Panel, heat_maps, lines
from benchmarks.studies.findings import Estimate, Finding, overview, verdict
from benchmarks.studies.pooling.measure import (
    CAPACITIES,
    CONFIGURATIONS,
    NAME,
    NO_POOL,
    POOLS,
    TASK,
    WINDOWS,
    measure,
)
from benchmarks.studies.records import Record, measured_on, of_kind
from benchmarks.studies.study import Study, Written, image

Configuration = tuple[int, str, int]
"""A window, a kind of pooling and its kernel."""
OF_THE_NEEDLES: Configuration = (16, "max", 5)
"""The configuration of the paper's sections 5.1.1 and 5.2."""
OF_THE_TABLE: tuple[Configuration, ...] = (
    (32, "max", 7),
    (16, "max", 7),
    (64, "max", 7),
    (32, "max", 5),
    (32, "max", 9),
)
"""The configurations with pooling in the paper's table 2."""
WIDE: Configuration = (32, "max", 17)
"""The widest kernel here, for needles of seven digits that a tokenizer splits."""
NEARLY, ALIKE, ROBUST = 0.9, 0.05, 0.1
"""Share of needles that is called nearly all; differences that are called none, and small."""


def page(records: Sequence[Record]) -> Written:
    """Write the page, of the longest prompts that were measured."""
    records = of_kind(records, lengths=max(one["key"]["lengths"] for one in records))
    known = [one for one in records if one["measured"]["whole"]]
    findings = [_pooling(known), _kinds(known), _configurations(known), _needles(known)]
    lengths = sorted({one["key"]["length"] for one in records})
    parts = [
        "# Study: pooling, windows and needles",
        written_by(f"python -m benchmarks.studies {NAME}"),
        paragraph(
            "[SnapKV](../../policies/snapkv.md) (NeurIPS 2024; arXiv 2404.14469) keeps for each query head what the "
            "last tokens of a prompt attend to, and with it the neighbours, by pooling. Its paper studies whether "
            "pooling is needed (section 5.2), which windows and kernels do (table 2), and how much of a prompt must "
            "stay for a needle to be found (section 5.1.1)."
        ),
        overview(findings),
        "## Needles found, by what is kept",
        plot(image(NAME, "capacities"), STUDY.path),
        _shares(known),
        "## The smallest capacity that holds a needle",
        plot(image(NAME, "needles"), STUDY.path),
        paragraph(
            "A colour is the smallest capacity from which on all needles of a depth and length are found; grey: not "
            f"with {CAPACITIES[-1]} tokens either; x: the whole cache finds none there, so there is nothing to lose."
        ),
        "## How it was measured",
        paragraph(
            f"{records[0]['key']['model']}, 32-bit floats; {len(records)} needles (task [{TASK}](../../tasks.md), "
            f"prompts of about {' and '.join(f'{length:,}' for length in lengths)} tokens, evenly spread depths), of "
            f"which the whole cache finds {len(known)}: those count. A needle is found if every token of its number is "
            "the likeliest one, as in a greedy answer. Every configuration and capacity keeps its own tokens of one "
            "exact prompt; `tests/benchmarks/studies` compares that with the policy. A difference is none up "
            f"to {100 * ALIKE:.0f} points and small up to {100 * ROBUST:.0f}; intervals are a bootstrap over needles. "
            "The paper has 7B models and prompts of 1,000 to 380,000 tokens (needles) and 5,000 to 30,000 (lines); "
            f"LongBench was not run. {measured_on(records, NAME)}."
        ),
    ]
    images = {image(NAME, "capacities"): _capacities_plot(known), image(NAME, "needles"): _needles_plot(known)}
    return Written("\n\n".join(parts) + "\n", images)


def scores_of(one: Record, configuration: Configuration) -> list[int]:
    """For each of CAPACITIES: 1 if the needle is found."""
    first = CONFIGURATIONS.index(configuration) * len(CAPACITIES)
    scores: list[int] = one["measured"]["found"][first : first + len(CAPACITIES)]
    return scores


def _means(known: Sequence[Record], configuration: Configuration) -> list[float]:
    """For each needle: the share of capacities at which it is found."""
    return [statistics.fmean(scores_of(one, configuration)) for one in known]


def _less(known: Sequence[Record], one: Configuration, other: Configuration) -> Estimate:
    pairs = zip(_means(known, one), _means(known, other), strict=True)
    return Estimate.of([first - second for first, second in pairs])


def _name(configuration: Configuration) -> str:
    window, pool, kernel = configuration
    return f"window {window}, {_pool_name(pool, kernel)}"


def _pool_name(pool: str, kernel: int) -> str:
    return "no pooling" if pool == NO_POOL else f"{pool} {kernel}"


def _pooling(known: Sequence[Record]) -> Finding:
    window = OF_THE_NEEDLES[0]
    none = (window, NO_POOL, 1)
    gains = {one: _less(known, one, none) for one in (OF_THE_NEEDLES, (window, *WIDE[1:]))}
    said = ", ".join(f"{one[1]} {one[2]} {gain.points()}" for one, gain in gains.items())
    return Finding(
        'Pooling "significantly enhances retrieval accuracy" (section 5.2, figure 8; window 16, kernel 5)',
        f"no pooling finds {Estimate.of(_means(known, none)).percent()}, all capacities together; {said}",
        len(known),
        verdict(*(gain.low > 0 for gain in gains.values())),
    )


def _kinds(known: Sequence[Record]) -> Finding:
    less = {kernel: _max_less_average(known, kernel) for pool, kernel in POOLS if pool == "avg"}
    said = "; ".join(f"kernel {kernel}: max is {one.points()} beside average" for kernel, one in less.items())
    return Finding(
        'Max or average pooling: the choice "did not yield significant differences" (section 5.2)',
        said,
        len(known),
        verdict(*(max(abs(one.low), abs(one.high)) <= ALIKE for one in less.values())),
    )


def _max_less_average(known: Sequence[Record], kernel: int) -> Estimate:
    """For each needle, the mean over windows."""
    both = [(_means(known, (window, "max", kernel)), _means(known, (window, "avg", kernel))) for window in WINDOWS]
    less = [[a - b for a, b in zip(most, average, strict=True)] for most, average in both]
    return Estimate.of([statistics.fmean(one) for one in zip(*less, strict=True)])


def _configurations(known: Sequence[Record]) -> Finding:
    shares = {one: Estimate.of(_means(known, one)) for one in OF_THE_TABLE}
    best, worst = (choose(shares, key=lambda one: shares[one].mean) for choose in (max, min))
    less = _less(known, best, worst)
    return Finding(
        'Windows 16 to 64 and kernels 5 to 9 do alike: "robustness across a range of configurations" (section 5.4, '
        "table 2, on LongBench)",
        f"the best of its five, {_name(best)}, finds {shares[best].percent()}, the worst, {_name(worst)}, "
        f"{shares[worst].percent()}: {less.points()}",
        len(known),
        verdict(less.mean <= ROBUST),
    )


def _needles(known: Sequence[Record]) -> Finding:
    longest = max(one["key"]["length"] for one in known)
    some = of_kind(known, length=longest)
    found = {one: [Estimate.of([scores_of(each, one)[place] for each in some]) for place in range(len(CAPACITIES))]
             for one in (OF_THE_NEEDLES, WIDE)}  # fmt: skip
    enough = {
        one: next((capacity for capacity, at in zip(CAPACITIES, row, strict=True) if at.mean >= NEARLY), None)
        for one, row in found.items()
    }
    said = "; ".join(
        f"{_name(one)}: " + (f"at least {100 * NEARLY:.0f} % at {enough[one]} tokens" if enough[one] else
                             f"{row[-1].percent()} at {CAPACITIES[-1]} tokens, the most that was tried")
        for one, row in found.items()
    )  # fmt: skip
    return Finding(
        "With 1,024 tokens kept (window 16, kernel 5), needles are found in prompts of up to 140,000 tokens, and with "
        '"only a little accuracy drop" beyond (section 5.1.1, figure 6)',
        f"of prompts of {longest:,} tokens, {said}",
        len(some),
        verdict(enough[OF_THE_NEEDLES] is not None),
    )


def _shares(known: Sequence[Record]) -> str:
    rows = []
    for window in WINDOWS:
        for pool, kernel in POOLS:
            row = [scores_of(one, (window, pool, kernel)) for one in known]
            shares = [f"{100 * statistics.fmean(column):.0f}" for column in zip(*row, strict=True)]
            rows.append((str(window), _pool_name(pool, kernel), *shares,
                         Estimate.of(_means(known, (window, pool, kernel))).percent()))  # fmt: skip
    heads = ("window", "pooling", *(f"{capacity} tokens" for capacity in CAPACITIES), "all capacities")
    return table(heads, rows)


def _capacities_plot(known: Sequence[Record]) -> bytes:
    panels = []
    for window in WINDOWS:
        lined: Mapping[str, list[float | None]] = {
            _pool_name(*pool): [
                100 * statistics.fmean(column)
                for column in zip(*(scores_of(one, (window, *pool)) for one in known), strict=True)
            ]
            for pool in POOLS
        }
        panels.append(Panel(f"window of {window} tokens", lined))
    axes = LineAxes("tokens that a head keeps", "needles found, %", ticks=CAPACITIES, limits=(-3, 103), nested=True)
    return lines(f"Needles found under SnapKV ({len(known)} needles)", panels, axes)


def _needles_plot(known: Sequence[Record]) -> bytes:
    lengths = sorted({one["key"]["length"] for one in known})
    depths = sorted({one["key"]["depth"] for one in known})
    configurations = [OF_THE_NEEDLES, OF_THE_TABLE[0], WIDE]
    maps = []
    for configuration in configurations:
        values = np.full((len(depths), len(lengths)), np.nan)
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                values[row, column] = smallest(of_kind(known, length=length, depth=depth), configuration)
        none = np.array([[not of_kind(known, length=length, depth=depth) for length in lengths] for depth in depths])
        maps.append(Map(_name(configuration), values, none))
    axes = MapAxes("tokens of the prompt", "depth of the needle, %",
                   "smallest capacity that holds them all",
                   x_names=[f"{length:,}" for length in lengths], y_names=[f"{100 * depth:.0f}" for depth in depths],
                   limits=(CAPACITIES[0], CAPACITIES[-1]))  # fmt: skip
    return heat_maps("Tokens that a head must keep for a needle to be found", maps, axes)


def smallest(needles: Sequence[Record], configuration: Configuration) -> float:
    """Return the smallest capacity from which on all needles are found; NaN where there is none, or no needle."""
    enough = float("nan")
    if not needles:
        return enough
    for place in reversed(range(len(CAPACITIES))):
        if not all(scores_of(one, configuration)[place] for one in needles):
            break
        enough = float(CAPACITIES[place])
    return enough


STUDY = Study(NAME, measure, page)
