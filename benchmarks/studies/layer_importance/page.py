"""The page of the study of layers, written from its records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.page import paragraph, plot, span, table, written_by
from benchmarks.studies.figures import LineAxes, Map, MapAxes, Panel, heat_maps, lines
from benchmarks.studies.findings import Estimate, Finding, overview, verdict
from benchmarks.studies.layer_importance.measure import (
    COSINES,
    NAME,
    POLICIES,
    SHARES,
    SINKS,
    SWEEP,
    WHOLE,
    division,
    mean_layers,
    measure,
)
from benchmarks.studies.records import Record, measured_on, of_kind
from benchmarks.studies.study import Study, Written, image
from kvc_trt.methods.base.layer_budget import DEFAULT_SHARE
from kvc_trt.reference.model.squeeze import unimportant_from

FEW = 2
"""Layers at either end that are called the first and the last few, in models of eight layers or more."""
SAME, ELSEWHERE = 0.8, 0.05
"""Share of layers from which groups of several tasks are called a pattern, and share of the cache that counts."""
BUDGET, PROMPT = 1000, 10_000
"""Tokens per layer, and tokens of a prompt, of the caches that are compared; figures are shares."""
OF_THE_PAPER = (0.3, 0.4)
"""The shares p that the paper recommends."""
Means = Mapping[str, list[list[float]]]
"""By kind of prompt: for every prompt, the mean cosine of each layer."""


def page(records: Sequence[Record]) -> Written:
    """Write the page."""
    means, swept = means_of(records), of_kind(records, part=SWEEP)
    settings = records[0]["key"]
    findings = [_halves(means), _ends(means), _tasks(means), _adaptive(means), _best_share(swept)]
    parts = [
        "# Study: which layers matter?",
        written_by(f"python -m benchmarks.studies {NAME}"),
        paragraph(
            "SqueezeAttention (arXiv 2404.04793; [layer budgets](../../policies/layer-budgets.md)) gives more cache to "
            "layers whose attention changes the residual stream much. Its measure is the cosine before and after a "
            "layer's attention (equation 5): a high one says that the layer matters little."
        ),
        overview(findings),
        paragraph(
            f"*The first and the last few* are {FEW} layers each. Groups are a pattern if {100 * SAME:.0f} % of layers "
            f"are in the same group for every kind of prompt; a division differs if more than {100 * ELSEWHERE:.0f} % "
            "of the cache lie elsewhere."
        ),
        "## Layers and tokens",
        plot(image(NAME, "map"), STUDY.path),
        plot(image(NAME, "layers"), STUDY.path),
        "## Groups by kind of prompt (tables 7 and 8)",
        _groups_table(means),
        paragraph(
            "The least important of three clusters are the unimportant layers, of the mean over prompts of a kind. "
            "*Elsewhere* is the share of the cache that lies in other layers than a prompt's own cosines would have "
            f"it, if the division (p = {DEFAULT_SHARE}) is calibrated on prompts of the same kind, or of one other."
        ),
        "## The share p (table 6)",
        plot(image(NAME, "shares"), STUDY.path),
        _shares_table(swept),
        paragraph(
            f"The score is the surprise of a true summary of a log ([log-summary](../../tasks.md)), in nats a token "
            f"above the whole cache: lower is better. Layers keep {100 * settings['budget']:g} % of the prompt on "
            "average, divided by the prompt's own cosines; p = 1 is the undivided cache. A layer keeps no more than "
            "the prompt; what is left over goes to the next important ones."
        ),
        "## How it was measured",
        paragraph(
            f"{settings['model']}, 32-bit floats. Cosines: {sum(map(len, means.values()))} prompts of {len(means)} "
            f"kinds ([texts](../../../benchmarks/studies/texts.py)), documents of {settings['document']} tokens; the "
            f"map shows the first {settings['positions']} tokens. Shares: {len(swept)} logs of about "
            f"{statistics.fmean(one['measured']['prompt_tokens'] for one in swept):.0f} tokens; the prompt is read "
            f"exactly, and its caches are cut afterwards, with {SINKS} first tokens under `streaming-llm`. Intervals "
            "are a bootstrap over prompts. The paper has models of 7B to 70B parameters and 200 prompts; its data sets "
            f"were not run here. {measured_on(records, NAME)}."
        ),
    ]
    images = {
        image(NAME, "map"): _map(records),
        image(NAME, "layers"): _layers_plot(means),
        image(NAME, "shares"): _shares_plot(swept),
    }
    return Written("\n\n".join(parts) + "\n", images)


def means_of(records: Sequence[Record]) -> Means:
    """Return the mean cosines of every prompt's layers, by kind."""
    cosines = of_kind(records, part=COSINES)
    kinds = dict.fromkeys(one["key"]["kind"] for one in cosines)
    return {kind: [mean for one in of_kind(cosines, kind=kind) for mean in one["measured"]["means"]] for kind in kinds}


def unimportant(layers: Sequence[float]) -> frozenset[int]:
    """Return the layers of the highest of three clusters of cosines: those that give up cache."""
    ranked = sorted(range(len(layers)), key=lambda layer: (layers[layer], layer))
    return frozenset(ranked[unimportant_from([layers[layer] for layer in ranked]) :])


def elsewhere(own: Sequence[float], other: Sequence[float]) -> float:
    """Return the share of the cache that two divisions, by these cosines, put into different layers."""
    mine, others = (division(layers, BUDGET, DEFAULT_SHARE, PROMPT) for layers in (own, other))
    moved = sum(abs(a - b) for a, b in zip(mine, others, strict=True))
    return moved / (2 * BUDGET * len(own))


def _prompts(means: Means) -> list[list[float]]:
    return [one for some in means.values() for one in some]


def _few(prompts: Sequence[Sequence[float]]) -> int:
    return min(FEW, len(prompts[0]) // 4)


def _halves(means: Means) -> Finding:
    prompts = _prompts(means)
    half, few = len(prompts[0]) // 2, _few(prompts)
    first, second = (Estimate.of([statistics.fmean(one[part]) for one in prompts])
                     for part in (slice(0, half), slice(half, None)))  # fmt: skip
    less = Estimate.of([statistics.fmean(one[:half]) - statistics.fmean(one[half:]) for one in prompts])
    middle = Estimate.of([statistics.fmean(one[few:half]) - statistics.fmean(one[half:-few]) for one in prompts])
    return Finding(
        'The first half of layers "contributes more to the output embeddings" than the second (section 3, figure 2)',
        f"mean cosine {first.mean:.3f} and {second.mean:.3f}, difference {_signed(less)}; without the {few} layers at "
        f"either end {_signed(middle)}",
        len(prompts),
        verdict(less.high < 0, middle.high < 0),
    )


def _ends(means: Means) -> Finding:
    prompts = _prompts(means)
    few = _few(prompts)
    less = [
        Estimate.of([statistics.fmean(one[part]) - statistics.fmean(one[few:-few]) for one in prompts])
        for part in (slice(0, few), slice(-few, None))
    ]
    return Finding(
        'The "first and last few layers" tend to be more critical than others (section 3)',
        f"cosine less that of the layers between: the first {_signed(less[0])}, the last {_signed(less[1])}",
        len(prompts),
        verdict(*(one.high < 0 for one in less)),
    )


def _signed(one: Estimate) -> str:
    return f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})"


def _groups(means: Means) -> dict[str, frozenset[int]]:
    return {kind: unimportant(mean_layers(some)) for kind, some in means.items()}


def _tasks(means: Means) -> Finding:
    groups, layers = _groups(means), len(_prompts(means)[0])
    counts = [layers - len(one) for one in groups.values()]
    moved = frozenset.union(*groups.values()) - frozenset.intersection(*groups.values())
    return Finding(
        'Groups have "a rough pattern" with "task-specific fluctuations": 17 to 19 of 32 layers important on Mistral '
        "(appendix A.3, tables 7 and 8)",
        f"{span(map(str, sorted({min(counts), max(counts)})))} of {layers} layers important, by kind of prompt; "
        f"{len(moved)} layers change their group",
        len(_prompts(means)),
        verdict(bool(moved), 1 - len(moved) / layers >= SAME),
    )


def _adaptive(means: Means) -> Finding:
    own = Estimate.of([share for kind in means for share in _elsewhere(means, kind, [kind])])
    other = Estimate.of([share for kind in means for share in _elsewhere(means, kind, [o for o in means if o != kind])])
    return Finding(
        'Layers are better grouped for each prompt: "we would still recommend an adaptive way" (appendix A.3)',
        f"of the cache, {own.percent()} lie elsewhere than a prompt's own cosines say if calibrated on its own kind, "
        f"{other.percent()} on another kind",
        len(_prompts(means)),
        verdict(own.low > ELSEWHERE, other.low > ELSEWHERE),
    )


def _elsewhere(means: Means, kind: str, calibrated: Sequence[str]) -> list[float]:
    """For each prompt of a kind: the mean share that lies elsewhere under a calibration on each of some kinds."""
    others = [mean_layers(means[one]) for one in calibrated]
    return [statistics.fmean(elsewhere(own, other) for other in others) for own in means[kind]]


def _groups_table(means: Means) -> str:
    groups, layers = _groups(means), len(_prompts(means)[0])
    rows = []
    for kind, group in groups.items():
        others = [one for one in means if one != kind]
        important = ", ".join(str(layer) for layer in range(layers) if layer not in group)
        shares = [Estimate.of(_elsewhere(means, kind, some)).percent() for some in ([kind], others)]
        sizes = [layers - len(unimportant(one)) for one in means[kind]]
        each = span(map(str, sorted({min(sizes), max(sizes)})))
        rows.append((kind, f"{layers - len(group)} / {len(group)}", important, each,
                     *shares, str(len(means[kind]))))  # fmt: skip
    heads = ("prompts", "important / unimportant", "the important layers", "important, prompt by prompt",
             "elsewhere, own kind", "elsewhere, another", "n")  # fmt: skip
    return table(heads, rows)


def _lost(swept: Sequence[Record], policy: str, place: int) -> list[float]:
    """For each log: nats a token above the whole cache, with the place-th share."""
    return [one["measured"][policy][place] - one["measured"][WHOLE] for one in swept]


def _against_undivided(swept: Sequence[Record], policy: str, share: float) -> Estimate:
    pairs = zip(_lost(swept, policy, SHARES.index(share)), _lost(swept, policy, SHARES.index(1.0)), strict=True)
    return Estimate.of([divided - undivided for divided, undivided in pairs])


def _best_share(swept: Sequence[Record]) -> Finding:
    best = {
        policy: min(SHARES, key=lambda share: statistics.fmean(_lost(swept, policy, SHARES.index(share))))
        for policy in POLICIES
    }
    found = {policy: [_against_undivided(swept, policy, share) for share in OF_THE_PAPER] for policy in POLICIES}
    said = "; ".join(
        f"`{policy}`: best at {best[policy]}, p = {OF_THE_PAPER[1]} gives {_signed(some[1])} nats a token beside p = 1"
        for policy, some in found.items()
    )
    return Finding(
        "At 20 % of the prompt, ROUGE-L on SAMSum is 37.69 with p = 0.4 and 9.07 with p = 1, which divides nothing "
        '("0.3-0.4 is a reasonable choice range"; section 4.2, table 6)',
        said,
        len(swept),
        verdict(*(any(one.high < 0 for one in some) for some in found.values())),
    )


def _shares_table(swept: Sequence[Record]) -> str:
    rows = []
    for policy in POLICIES:
        estimates = [Estimate.of(_lost(swept, policy, place)) for place in range(len(SHARES))]
        rows.append((f"`{policy}`", *(f"{one.mean:.2f} ({one.low:.2f}-{one.high:.2f})" for one in estimates)))
    return table(("nats above the whole cache", *(f"p = {share}" for share in SHARES)), rows)


def _map(records: Sequence[Record]) -> bytes:
    cosines = of_kind(records, part=COSINES)
    first = cosines[0]["key"]
    maps = []
    for kind in dict.fromkeys(one["key"]["kind"] for one in cosines):
        some = [np.array(one["measured"]["map"], dtype=np.float64) for one in of_kind(cosines, kind=kind)]
        count = sum(one["key"]["prompts"] for one in of_kind(cosines, kind=kind))
        maps.append(Map(f"{kind} ({count} prompts)", np.mean(some, axis=0).T))
    axes = MapAxes("layer", "token", "cosine before and after attention (darkest: 0.95 and less)",
                   y_step=first["bin"], limits=(0.95, 1.0))  # fmt: skip
    return heat_maps("How little each layer's attention changes the residual stream", maps, axes)


def _layers_plot(means: Means) -> bytes:
    changed = {kind: [1 - one for one in mean_layers(some)] for kind, some in means.items()}
    axes = LineAxes("layer", "1 - cosine: high is important", limits=(0.002, 1.0), log=True)
    return lines("Importance of layers by kind of prompt", [Panel("mean over tokens and prompts", changed)], axes)


def _shares_plot(swept: Sequence[Record]) -> bytes:
    lost = {
        policy: [statistics.fmean(_lost(swept, policy, place)) for place in range(len(SHARES))] for policy in POLICIES
    }
    highest = max(max(one) for one in lost.values())
    axes = LineAxes("p, share that unimportant layers keep",
                    "nats a token above the whole cache", ticks=SHARES, limits=(0.0, 1.05 * highest))  # fmt: skip
    return lines("Surprise of a true summary at a fifth of the cache", [Panel(f"{len(swept)} logs", lost)], axes)


STUDY = Study(NAME, measure, page)
