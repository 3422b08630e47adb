"""The page of the study of hit rates, written from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page import paragraph, plot, written_by
from benchmarks.studies.figures import LineAxes, Panel, Values, lines
from benchmarks.studies.findings import Estimate, Finding, overview, verdict
from benchmarks.studies.hit_rates.measure import INSTRUCTIONS, NAME, SINKS, WINDOWS, measure
from benchmarks.studies.records import Record, measured_on, of_kind
from benchmarks.studies.study import Study, Written, image
from benchmarks.studies.texts import AT_BEGINNING, AT_END, POSITIONS

HIGH, ALIKE = 0.8, 0.1
"""A hit rate from which on it is called high, and a difference up to which two are called alike."""
WAYS = ("as published", "without sinks")
"""The two figures of every rate, in their order."""
WITHOUT = 1


def page(records: Sequence[Record]) -> Written:
    """Write the page, of the longest documents that were measured."""
    records = of_kind(records, document=max(one["key"]["document"] for one in records))
    along, asked = _along(records), of_kind(records, part=INSTRUCTIONS)
    settings = records[0]["key"]
    findings = [_before_generation(along), _during_generation(along), _instructions(asked), _positions(asked)]
    answered = Estimate.of([one["distinct"] for one in along])
    parts = [
        "# Study: does the end of a prompt point at what the answer uses?",
        written_by(f"python -m benchmarks.studies {NAME}"),
        paragraph(
            "[SnapKV](../../policies/snapkv.md) keeps what the last tokens of a prompt attend to. Its paper (NeurIPS "
            "2024, sections 3 and 4.2; arXiv 2404.14469) shows first that this is what the answer will attend to. The "
            "hit rate of equations 2 to 8 is the share of important features of the prompt (those to which a query of "
            f"the answer gives more than {settings['threshold']:g} of a head's attention) among those that the votes "
            f"of a window choose ({100 * settings['kept']:g} % of the prefix, per head). Both numbers are those of the "
            "preprint; the published version names none."
        ),
        overview(findings),
        paragraph(
            f"The second figure, *without sinks*, leaves out the first {SINKS} tokens of the prompt: every head gives "
            "them much attention whatever is asked, and every policy keeps them, so they raise all hit rates. "
            f"We call a rate high from {100 * HIGH:.0f} % on, and two rates alike up to {100 * ALIKE:.0f} points "
            "apart. A claim that is true as published and not without sinks holds in part."
        ),
        "## Along the prompt, and along the answer",
        plot(image(NAME, "windows"), STUDY.path),
        _along_in_words(along, settings, answered),
        "## Other instructions about one document",
        plot(image(NAME, "instructions"), STUDY.path),
        _instructions_in_words(asked, settings),
        "## The instruction at the end or at the beginning",
        plot(image(NAME, "positions"), STUDY.path),
        paragraph(
            f"The last {settings['observed']} tokens of a prompt vote. With the instruction at the beginning they are "
            "of the document alone."
        ),
        "## How it was measured",
        _how(records, settings),
    ]
    images = {
        image(NAME, "windows"): _windows_plot(along),
        image(NAME, "instructions"): _instructions_plot(asked),
        image(NAME, "positions"): _positions_plot(asked),
    }
    return Written("\n\n".join(parts) + "\n", images)


def _along(records: Sequence[Record]) -> list[Record]:
    """Return the documents whose answers were followed over windows."""
    return [document for one in of_kind(records, part=WINDOWS) for document in one["measured"]["documents"]]


def _layers(one: Record, part: str, window: int, way: int) -> list[float | None]:
    """Return, by layer, the rate of one window in the parts `prompt` or `answer` of a record."""
    return [layer[part][window][way] for layer in one["layers"]]


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are there."""
    some = [value for value in values if value is not None]
    return sum(some) / len(some)


def _over_layers(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the mean over documents, by layer."""
    return [_mean(column) if any(one is not None for one in column) else None for column in zip(*rows, strict=True)]


def _before_generation(along: Sequence[Record]) -> Finding:
    def rates(window: int, way: int) -> list[float]:
        return [_mean(_layers(one, "prompt", window, way)) for one in along]

    last, first = ([Estimate.of(rates(window, way)) for way in range(2)] for window in (-1, 0))
    rises = [
        Estimate.of([a - b for a, b in zip(rates(-1, way), rates(0, way), strict=True)]).low > 0 for way in range(2)
    ]
    return Finding(
        'The last window of the prompt finds a "highly similar" pattern to that of generation, more than windows '
        "before it (section 3, figure 2)",
        f"last window {last[0].percent()}, first of those shown {first[0].percent()}; without sinks "
        f"{last[1].percent()} and {first[1].percent()}",
        len(along),
        verdict(*(last[way].mean >= HIGH and rises[way] for way in range(2))),
    )


def _during_generation(along: Sequence[Record]) -> Finding:
    windows = len(along[0]["layers"][0]["answer"])

    def estimate(window: int, way: int) -> Estimate:
        return Estimate.of([_mean(_layers(one, "answer", window, way)) for one in along])

    found = [[estimate(window, way) for window in range(windows)] for way in range(2)]
    said = ["; ".join(f"{one.mean * 100:.0f}" for one in some[:-1]) + f"; {some[-1].percent()}" for some in found]
    return Finding(
        f'What the last window votes for stays important in {windows} windows of the answer: "remarkable consistency" '
        "(section 3, figure 3)",
        f"window by window {said[0]}; without sinks {said[1]}",
        len(along),
        verdict(*(some[-1].mean >= HIGH and some[0].mean - some[-1].mean <= ALIKE for some in found)),
    )


def _instructions(asked: Sequence[Record]) -> Finding:
    def means(name: str, way: int) -> list[float]:
        return [_mean([layer[way] for layer in one["measured"][name]]) for one in asked]

    pairs, same = ([Estimate.of(means(name, way)) for way in range(2)] for name in ("pairs", "same"))
    less = [
        Estimate.of([a - b for a, b in zip(means("pairs", way), means("same", way), strict=True)]).high < 0
        for way in range(2)
    ]
    falls = [Estimate.of([_last_less_first(one["measured"]["pairs"], way) for one in asked]) for way in range(2)]
    return Finding(
        "Different instructions about one document find other features important, more so in later layers: a "
        '"descending trend" (section 4.2.1, figure 4)',
        f"overlap of two instructions {pairs[0].percent()}, of two answers to one {same[0].percent()}; from the first "
        f"third of layers to the last {falls[0].points()}; without sinks {pairs[1].percent()}, {same[1].percent()}, "
        f"{falls[1].points()}",
        len(asked),
        verdict(*less, *(one.high < 0 for one in falls)),
    )


def _last_less_first(layers: Sequence[Sequence[float | None]], way: int) -> float:
    """Return the mean of the last third of layers minus that of the first."""
    third = max(1, len(layers) // 3)
    column = [layer[way] for layer in layers]
    return _mean(column[-third:]) - _mean(column[:third])


def _positions(asked: Sequence[Record]) -> Finding:
    def means(name: str, way: int) -> list[float]:
        return [_mean([layer[way] for layer in one["measured"][name]]) for one in asked]

    found = {name: [Estimate.of(means(name, way)) for way in range(2)] for name in POSITIONS}
    return Finding(
        'Hit rates are "consistently high" wherever the instruction stands, before or after the document (section '
        "4.2.2, figure 5)",
        f"at the end {found[AT_END][0].percent()}, at the beginning {found[AT_BEGINNING][0].percent()}; without sinks "
        f"{found[AT_END][1].percent()} and {found[AT_BEGINNING][1].percent()}",
        len(asked),
        verdict(*(
            min(found[AT_END][way].mean, found[AT_BEGINNING][way].mean) >= HIGH
            and abs(found[AT_END][way].mean - found[AT_BEGINNING][way].mean) <= ALIKE
            for way in range(2)
        )),
    )  # fmt: skip


OVER_LAYERS = LineAxes("layer", "hit rate")


def _windows_plot(along: Sequence[Record]) -> bytes:
    windows = len(along[0]["layers"][0]["prompt"])
    panels = [
        Panel(
            f"windows of the prompt, {WAYS[way]}",
            {
                f"{place - windows}": _over_layers([_layers(one, "prompt", place, way) for one in along])
                for place in range(windows)
            },
        )
        for way in range(2)
    ]
    answers = len(along[0]["layers"][0]["answer"])
    last: dict[str, Values] = {
        f"answer {place + 1}": _over_layers([_layers(one, "answer", place, WITHOUT) for one in along])
        for place in range(answers)
    }
    panels.append(Panel("the last window, by window of the answer, without sinks", last))
    title = "Important features of the prompt that a window's votes choose (-1: the last window of the prompt)"
    return lines(title, panels, LineAxes("layer", "hit rate", shades=True))


def _instructions_plot(asked: Sequence[Record]) -> bytes:
    panels = []
    for way, name in enumerate(WAYS):
        kinds = dict.fromkeys(one["key"]["kind"] for one in asked)
        lined: dict[str, Values] = {
            kind: _over_layers([_column(one, "pairs", way) for one in of_kind(asked, kind=kind)]) for kind in kinds
        }
        lined["one instruction, two answers"] = _over_layers([_column(one, "same", way) for one in asked])
        level = ("chance", asked[0]["key"]["kept"])
        panels.append(Panel(name, lined, level))
    return lines("Overlap of what two instructions about one document vote for", panels, LineAxes("layer", "overlap"))


def _positions_plot(asked: Sequence[Record]) -> bytes:
    kinds = dict.fromkeys(one["key"]["kind"] for one in asked)
    panels = []
    for way, name in enumerate(WAYS):
        lined: dict[str, Values] = {
            f"{kind}, {position}": _over_layers([_column(one, position, way) for one in of_kind(asked, kind=kind)])
            for kind in kinds
            for position in POSITIONS
        }
        panels.append(Panel(name, lined))
    return lines(
        "Hit rate of the last tokens of a prompt on its answer, with the instruction at its end or beginning",
        panels,
        OVER_LAYERS,
    )


def _column(one: Record, name: str, way: int) -> list[float | None]:
    return [layer[way] for layer in one["measured"][name]]


def _along_in_words(along: Sequence[Record], settings: Mapping[str, Any], distinct: Estimate) -> str:
    control = [
        Estimate.of([_mean([layer["recent"][way] for layer in one["layers"]]) for one in along]) for way in range(2)
    ]
    important = Estimate.of([_mean([layer["important"] for layer in one["layers"]]) for one in along])
    layers = range(len(along[0]["layers"]))
    by_layer = [_mean([one["layers"][layer]["important"] for one in along]) for layer in layers]
    return paragraph(
        f"Windows have {settings['window']} tokens; the answer is followed over {settings['answer_windows']}. As a "
        f"control, the first {SINKS} and the last tokens of the prefix, as many as votes choose, hit "
        f"{control[0].percent()}, without sinks {control[1].percent()}; any choice at random hits "
        f"{100 * settings['kept']:g} %. Of a head's tokens, {important.mean:.2f} are important to a query of the "
        "answer on average. The model may not end its answer, and is sampled (temperature 0.8), since it repeats "
        f"itself greedily; {distinct.percent()} of the answers' runs of four tokens are no repetitions. "
        f"All layers count alike. To layer {by_layer.index(min(by_layer))} no more than {min(by_layer):.3f} tokens of "
        "a head are important: a line there is noise, or has a gap, as it is without sinks wherever little but the "
        "first tokens is important."
    )


def _instructions_in_words(asked: Sequence[Record], settings: Mapping[str, Any]) -> str:
    return paragraph(
        "As in the paper, an instruction with its answer votes. The overlap of two instructions is set beside that of "
        "two answers that were sampled to one instruction: what is below it is due to the instruction. Answers have at "
        f"most {settings['asked_answer']} tokens. `manual` is a piece of the Python language's documentation, `log` "
        "and `facts` are prose of this project's tasks (log-summary, multi-instruction); each has three instructions."
    )


def _how(records: Sequence[Record], settings: Mapping[str, Any]) -> str:
    along, asked = _along(records), [one["measured"] for one in of_kind(records, part=INSTRUCTIONS)]
    long, short = (round(_mean([one["prompt_tokens"] for one in some])) for some in (along, asked))
    return paragraph(
        f"{settings['model']}, 32-bit floats, the whole cache; {len(along)} prompts of about {long:,} tokens along "
        f"windows, {len(asked)} documents with prompts of about {short:,} tokens for instructions. Rates are means "
        "over queries, then layers, then documents; intervals are a bootstrap over documents. The paper has 7B models, "
        f"dialogues of more than 3,000 tokens, and documents of 10,000 to 19,000. {measured_on(records, NAME)}."
    )


STUDY = Study(NAME, measure, page)
