"""The page of SqueezeAttention's study of its policies with and without budgets by layer, written from its records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.page import paragraph, plot, table, written_by
from benchmarks.studies.figures import LineAxes, Panel, lines
from benchmarks.studies.findings import Estimate, Finding, overview, verdict
from benchmarks.studies.records import Record, measured_on, of_kind
from benchmarks.studies.squeeze import engines
from benchmarks.studies.squeeze.engines import BATCHES, COST, COST_TOKENS, MEMORY, STEPS
from benchmarks.studies.squeeze.equal import Curves, budget_as_good, budget_at
from benchmarks.studies.squeeze.measure import (
    ANSWERS,
    FOLLOWING,
    MANUAL,
    NAME,
    NEEDLE,
    POLICIES,
    SHARES,
    SUMMARY,
    WITH,
    WITHOUT,
    measure,
    place,
)
from benchmarks.studies.study import Study, Written, image
from kvc_trt.sizes import readable_size

TEXTS = (SUMMARY, MANUAL)
BUDGET, BASELINE = 0.2, 0.3
"""The paper's budgets of Mistral-7B for equal answers, with and without budgets by layer (tables 2 and 9)."""
HALF = 0.5
"""A budget at which needles are within reach of windows."""
NEAR = (0.05, 0.1, 0.2)
"""Nats of divergence from the whole cache up to which answers are called equal."""
SPEED_UP, BESIDE_BASELINE = 2.2, 587.8 / 824.4
"""Mistral-7B: most beside the whole cache (table 3), and the baseline's part of squeeze's at batch 128 (table 9)."""
OVERHEAD = 0.063
"""Share of a prefill, in table 4."""
MEMORIES = (1 << 30, 4 << 30, 16 << 30)
SQUEEZED, UNIFORM, FULL = "squeeze-online 20 %", "uniform 30 %", "whole cache"
"""Sides of `engines`."""


def page(records: Sequence[Record]) -> Written:
    """Write the page, of the longest prompts that were measured."""
    answers = of_kind(records, part=ANSWERS)
    if not answers:
        raise SystemExit(f"error: no answers were measured yet; python -m benchmarks.studies {NAME} goes on")
    answers = of_kind(answers, length=max(one["key"]["length"] for one in answers))
    head = answers[0]["key"]
    counts = {kind: len(of_kind(answers, kind=kind)) for kind in (*TEXTS, NEEDLE)}
    findings = [_saved(answers), _better(answers), _needles(answers)]
    sections = []
    if len(of_kind(records, part=STEPS)) == len(BATCHES):
        findings.append(_throughput(records))
        sections += _speed_section(records)
    if len(of_kind(records, part=COST)) == len(COST_TOKENS):
        findings.append(_cost(records))
        sections += _cost_section(records)
    missing = [
        what
        for part, what in (
            (STEPS, "steps over batches (tables 3 and 9)"),
            (COST, "the cost in a prefill (tables 4 and 5)"),
        )
        if len(of_kind(records, part=part)) < len(BATCHES if part == STEPS else COST_TOKENS)
    ]
    if missing:
        again = f"`python -m benchmarks.studies {NAME}` goes on with that."
        sections.append(paragraph(f"Not measured yet: {', '.join(missing)}. {again}"))
    parts = [
        "# Study: a budget divided between layers",
        written_by(f"python -m benchmarks.studies {NAME}"),
        paragraph(
            "SqueezeAttention (arXiv 2404.04793; [layer budgets](../../policies/layer-budgets.md)) divides a cache "
            "between layers for each prompt, under three policies that evict while they answer. Its abstract claims "
            '"around 30% to 70% of the memory reductions and up to 2.2x of throughput improvements".'
        ),
        overview(findings),
        paragraph(
            "*Nats* are the divergence of the next token's distribution from the whole cache's, a token: 0 is the "
            "whole cache, and lower is better. A difference is that of two caches on the same prompts."
        ),
        "## Answers over budgets (figure 3)",
        plot(image(NAME, "budgets"), STUDY.path),
        _budgets_table(answers),
        paragraph(
            "Budgets are shares of the prompt, on average over layers. Under `sliding-window` the first tokens go once "
            "prompt and text exceed the budget, even one of 100 %, and most heads attend to them. Important layers of "
            "a divided cache have room for the whole text, first tokens included, at budgets well below 100 %."
        ),
        "## The smallest budget for equal answers (table 2)",
        _equal_table(answers),
        paragraph(
            f"Without and with (`{WITH}`), in percent of the prompt; between two budgets the mean is taken for a line. "
            "*None* is a mean that stays higher up to 100 %."
        ),
        "## Needles",
        plot(image(NAME, "needles"), STUDY.path),
        paragraph(
            "Needles lie evenly over the prompt. A policy of windows finds one where it has kept the place, so its "
            "line follows the budget; a divided budget gives some layers a longer window and others a shorter one."
        ),
        "## Rows that fit",
        _rows_table(records),
        paragraph(
            "Rows that fit beside the weights in a given memory, by the count of [plan](../../plan.md), not measured: "
            f"prompts of {engines.PROMPT} and answers of {engines.ANSWER:,} tokens, 32-bit floats. An engine with "
            f"`{WITH}` allocates `squeeze_cap` = 2 budgets in every layer, since any prompt may need them there. The "
            "last row counts what its budgets fill, which is all that an engine with `squeeze` takes: its layers have "
            "the sizes of a calibration."
        ),
        *sections,
        "## How it was measured",
        paragraph(
            f"{head['model']}, 32-bit floats; prompts with what follows have {head['length']} tokens, "
            f"up to {FOLLOWING} of them behind the prompt: {counts[SUMMARY]} true summaries of logs "
            f"([log-summary](../../tasks.md)), {counts[MANUAL]} pieces of Python's documentation, and "
            f"{counts[NEEDLE]} needles ([{head['task']}](../../tasks.md)). The prompt is read exactly, and its caches "
            "are cut afterwards; the text behind it is then fed token by token under each cache "
            "(`tests/benchmarks/studies` compares its logits with the policies'). Divisions follow `squeeze-online` "
            "with its defaults, p = 0.35 and twice the budget at most. Intervals are a bootstrap over prompts, or over "
            "steps. The paper has models of 7B to 70B parameters; its data sets were not run here. "
            f"{measured_on(records, NAME)}."
        ),
    ]
    images = {
        image(NAME, "budgets"): _budgets_plot(answers),
        image(NAME, "needles"): _needles_plot(answers),
    }
    return Written("\n\n".join(parts) + "\n", images)


def _speed_section(records: Sequence[Record]) -> list[str]:
    return [
        "## Throughput (tables 3 and 9)",
        _steps_table(records),
        paragraph(
            "Tokens of all rows per second of the processor, means and 95 % intervals, measured with caches of a "
            f"prompt of {engines.HALFWAY:,} tokens, as many as the whole cache holds in the middle of the paper's "
            f"{engines.PROMPT} + {engines.ANSWER:,} tokens; budgets are shares of {engines.PROMPT} tokens."
        ),
    ]


def _cost_section(records: Sequence[Record]) -> list[str]:
    return [
        "## The cost in a prefill (tables 4 and 5)",
        _cost_table(records),
        paragraph(
            "Seconds of the processor. The prefills are those of `streaming-llm` engines in turns, with the median "
            "of pairs and the least and the largest. Cosines are those of all layers, in PyTorch on streams of that "
            "size; the division is the graph's operator, in ONNX Runtime's own profile, and the reference's. The paper "
            "has 0.68 ms for the cosine of a layer and 1 ms for k-means, of 636 ms, on a GPU."
        ),
    ]


def curves(answers: Sequence[Record], kind: str, policy: str, division: str) -> Curves:
    """Return the divergence of every prompt of a kind of text, by share."""
    places = [place(policy, share, division) for share in SHARES]
    return np.array([[one["measured"]["divergence"][at] for at in places] for one in of_kind(answers, kind=kind)])


def _less(answers: Sequence[Record], kind: str, policy: str, share: float, name: str) -> Estimate:
    """Return the difference that a division makes at a budget, over prompts."""
    divided, uniform = (place(policy, share, division) for division in (WITH, WITHOUT))
    some = of_kind(answers, kind=kind)
    if kind == NEEDLE:
        some = [one for one in some if one["measured"]["whole"]]
    return Estimate.of([float(one["measured"][name][divided] - one["measured"][name][uniform]) for one in some])


def _signed(one: Estimate) -> str:
    return f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})"


def _saved(answers: Sequence[Record]) -> Finding:
    said, conditions = [], []
    for kind in TEXTS:
        found = {
            policy: budget_as_good(
                SHARES, curves(answers, kind, policy, WITHOUT), curves(answers, kind, policy, WITH), BASELINE
            )
            for policy in POLICIES
        }
        conditions += [one.high is not None and one.high < BASELINE for one in found.values()]
        said.append(f"on a {kind} " + ", ".join(f"`{policy}` {one.percent()}" for policy, one in found.items()))
    return Finding(
        "A divided cache of 20 % answers as well as an undivided one of 30 % (Mistral-7B, sliding window); 20 % for "
        "60 % (GPT-NeoX-20B, H2O), 30 % for 40 % (Llama2-70B, StreamingLLM; table 2)",
        f"as near to the whole cache as {100 * BASELINE:.0f} % undivided: " + "; ".join(said),
        min(len(of_kind(answers, kind=kind)) for kind in TEXTS),
        verdict(*conditions),
    )


def _better(answers: Sequence[Record]) -> Finding:
    found = {
        (policy, kind): _less(answers, kind, policy, BUDGET, "divergence") for policy in POLICIES for kind in TEXTS
    }
    said = "; ".join(
        f"`{policy}` " + ", ".join(f"{_signed(found[policy, kind])} on a {kind}" for kind in TEXTS)
        for policy in POLICIES
    )
    return Finding(
        '"Better model performance with even lower cache budgets than all three algorithms" (introduction, figure 3)',
        f"nats at {100 * BUDGET:.0f} % with a division beside none: {said}",
        min(len(of_kind(answers, kind=kind)) for kind in TEXTS),
        verdict(*(one.high < 0 for one in found.values())),
    )


def _needles(answers: Sequence[Record]) -> Finding:
    found = {
        (policy, share): _less(answers, NEEDLE, policy, share, "found")
        for share in (BUDGET, HALF)
        for policy in POLICIES
    }
    said = "; ".join(
        f"at {100 * share:.0f} % " + ", ".join(f"`{policy}` {found[policy, share].points()}" for policy in POLICIES)
        for share in (BUDGET, HALF)
    )
    return Finding(
        "The same for answers that are right or wrong (table 1 and figure 3: ROUGE and F1 over budgets)",
        f"needles found, with a division beside none: {said}",
        found[POLICIES[0], BUDGET].count,
        verdict(*(one.low > 0 for one in found.values())),
    )


def _milliseconds(records: Sequence[Record], batch: int) -> dict[str, list[float]]:
    (one,) = of_kind(records, part=STEPS, batch=batch)
    found: dict[str, list[float]] = one["measured"]["milliseconds"]
    return found


def _faster(records: Sequence[Record], batch: int, side: str, other: str) -> Estimate:
    """Return how many times as fast one side's steps are as the other's, step by step of the same turn."""
    found = _milliseconds(records, batch)
    return Estimate.of([b / a for a, b in zip(found[side], found[other], strict=True)])


def _throughput(records: Sequence[Record]) -> Finding:
    batch = max(BATCHES)
    whole, uniform = (_faster(records, batch, SQUEEZED, other) for other in (FULL, UNIFORM))
    (counted,) = of_kind(records, part=MEMORY)
    row, used = counted["measured"]["row"], counted["measured"]["used"]
    return Finding(
        f"Up to {SPEED_UP} times the whole cache's tokens per second (Mistral-7B at 20 %, table 3) and "
        f"{1 / BESIDE_BASELINE:.1f} times those of sliding window at 30 % (batch 128, table 9), at batches where the "
        "whole cache is out of memory",
        f"batch {batch}: {_times(whole)} the whole cache's steps, {_times(uniform)} those of 30 % undivided; a row "
        f"takes {100 * used[SQUEEZED] / row[UNIFORM]:.0f} % of one of 30 % by its budgets and "
        f"{100 * row[SQUEEZED] / row[UNIFORM]:.0f} % as allocated (modelled)",
        whole.count,
        verdict(whole.low > 1, uniform.low > 1, row[SQUEEZED] < row[UNIFORM]),
    )


def _times(one: Estimate) -> str:
    return f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f}) times"


def _overheads(record: Record) -> list[float]:
    pairs = record["measured"]["prefill_seconds"]
    return [b / a - 1 for a, b in zip(pairs["uniform"], pairs["squeeze-online"], strict=True)]


def _parts(record: Record, layers: int) -> tuple[float, float]:
    """Milliseconds of the cosines of all layers, and of the division in the graph."""
    measured = record["measured"]
    return layers * measured["cosine_milliseconds_of_a_layer"], measured["division_in_the_graph_milliseconds"]


def _layers(records: Sequence[Record]) -> int:
    return len(of_kind(records, part=ANSWERS)[0]["measured"]["cosines"])


def _cost(records: Sequence[Record]) -> Finding:
    (longest,) = of_kind(records, part=COST, tokens=max(COST_TOKENS))
    cosine, division = _parts(longest, _layers(records))
    prefill = 1000 * statistics.median(longest["measured"]["prefill_seconds"]["uniform"])
    share, overheads = (cosine + division) / prefill, Estimate.of(_overheads(longest))
    return Finding(
        "Cosines and k-means take 23 ms of a prefill of 636 ms, and a prefill 6.3 % longer (tables 4 and 5)",
        f"cosines {cosine:.1f} ms and division {division:.2f} ms, {100 * share:.2f} % of a prefill of "
        f"{prefill:,.0f} ms ({longest['key']['tokens']:,} tokens); measured prefills {overheads.percent(1)} longer",
        overheads.count,
        verdict(share < OVERHEAD, overheads.high < OVERHEAD),
    )


def _budgets_table(answers: Sequence[Record]) -> str:
    heads = ("nats from the whole cache", "", *(f"{100 * share:.0f} %" for share in SHARES))
    rows = []
    for policy in POLICIES:
        for kind in TEXTS:
            for division in (WITHOUT, WITH):
                means = curves(answers, kind, policy, division).mean(axis=0)
                rows.append((f"`{policy}`, {kind}", division, *(f"{one:.3f}" for one in means)))
    return table(heads, rows)


def _equal_table(answers: Sequence[Record]) -> str:
    rows = []
    for policy in POLICIES:
        for kind in TEXTS:
            without, divided = (curves(answers, kind, policy, one) for one in (WITHOUT, WITH))
            limits = [
                f"{budget_at(SHARES, without, limit).percent()}; {budget_at(SHARES, divided, limit).percent()}"
                for limit in NEAR
            ]
            as_good = budget_as_good(SHARES, without, divided, BASELINE).percent()
            rows.append((f"`{policy}`", kind, *limits, as_good, str(len(without))))
    heads = ("policy", "text", *(f"{limit} nats: without; with" for limit in NEAR),
             f"with, as good as {100 * BASELINE:.0f} % without", "n")  # fmt: skip
    return table(heads, rows)


def _steps_table(records: Sequence[Record]) -> str:
    rows = []
    for batch in BATCHES:
        rates = {
            side: Estimate.of([1000 * batch / one for one in steps])
            for side, steps in _milliseconds(records, batch).items()
        }
        shown = [f"{one.mean:,.1f} ({one.low:,.1f}-{one.high:,.1f})" for one in rates.values()]
        rows.append((str(batch), *shown, _times(_faster(records, batch, SQUEEZED, FULL)),
                     _times(_faster(records, batch, SQUEEZED, UNIFORM))))  # fmt: skip
    heads = (
        "batch",
        *(f"{side}, tokens/s" for side in engines.SIDES),
        "beside the whole cache",
        "beside 30 % undivided",
    )
    return table(heads, rows)


def _rows_table(records: Sequence[Record]) -> str:
    (one,) = of_kind(records, part=MEMORY)
    weights, row = one["measured"]["weights"], dict(one["measured"]["row"])
    row[f"{SQUEEZED}, by its budgets"] = one["measured"]["used"][SQUEEZED]
    rows = [
        (side, readable_size(size), *(f"{max(0, (memory - weights) // size):,}" for memory in MEMORIES))
        for side, size in row.items()
    ]
    return table(("side", "a row", *(f"rows in {readable_size(memory)}" for memory in MEMORIES)), rows)


def _cost_table(records: Sequence[Record]) -> str:
    rows = []
    for tokens in COST_TOKENS:
        (one,) = of_kind(records, part=COST, tokens=tokens)
        cosine, division = _parts(one, _layers(records))
        measured, overheads = one["measured"], sorted(_overheads(one))
        medians = [statistics.median(measured["prefill_seconds"][kind]) for kind in ("uniform", "squeeze-online")]
        longer = (
            f"{100 * statistics.median(overheads):+.1f} % ({100 * overheads[0]:+.1f} to {100 * overheads[-1]:+.1f})"
        )
        rows.append((
            f"{tokens:,}", *(f"{one:.2f}" for one in medians), longer, str(len(overheads)), f"{cosine:.1f}",
            f"{division:.2f}", f"{measured['division_milliseconds']:.2f}",
            f"{(cosine + division) / medians[0] / 10:.2f} %",
        ))  # fmt: skip
    heads = ("prompt", "prefill without, s", "with, s", "longer", "pairs", "cosines, ms", "division in the graph, ms",
             "in the reference, ms", "cosines and division, of a prefill")  # fmt: skip
    return table(heads, rows)


def _budgets_plot(answers: Sequence[Record]) -> bytes:
    panels = [
        Panel(
            policy,
            {
                f"{kind}, {division}": curves(answers, kind, policy, division).mean(axis=0).tolist()
                for kind in TEXTS
                for division in (WITHOUT, WITH)
            },
        )
        for policy in POLICIES
    ]
    values = [value for panel in panels for line in panel.lines.values() for value in line if value]
    axes = LineAxes("share of the prompt that a layer keeps on average", "nats a token from the whole cache",
                    ticks=SHARES, limits=(min(values) / 1.3, max(values) * 1.3), log=True)  # fmt: skip
    return lines("Answers with and without budgets by layer", panels, axes)


def _needles_plot(answers: Sequence[Record]) -> bytes:
    known = [one for one in of_kind(answers, kind=NEEDLE) if one["measured"]["whole"]]
    panels = [
        Panel(
            policy,
            {
                division: [
                    statistics.fmean(one["measured"]["found"][place(policy, share, division)] for one in known)
                    for share in SHARES
                ]
                for division in (WITHOUT, WITH)
            },
        )
        for policy in POLICIES
    ]
    axes = LineAxes("share of the prompt that a layer keeps on average", "share of needles found", ticks=SHARES,
                    limits=(-0.03, 1.03))  # fmt: skip
    return lines(f"Needles found ({len(known)} that the whole cache finds)", panels, axes)


STUDY = Study(NAME, measure, page)
