"""RocketKV's two stages on prompts of up to 16,384 tokens: the shipped `retrieval-text`, trained further.

    python -m training.retrieval_text.lengthen --output build/retrieval-text-16k    # a quarter of an hour
    python -m benchmarks.studies.two_stages.long_prompts --checkpoint build/retrieval-text-16k [--count 8] [--pages]

SmolLM2 reads at most 8,192 tokens. This model knows needles alone, and answers them at twice that length. Goes on where
it was stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.page import paragraph, plot, table, written_by
from benchmarks.studies.findings import Estimate, Finding, overview, verdict
from benchmarks.studies.records import Record, Records, measured_on, of_kind
from benchmarks.studies.study import Run, Study, Written, image, write_page
from benchmarks.studies.two_stages.cells import (
    ADAPTIVE,
    BUDGETS,
    DIVIDED,
    HALF,
    MEMORIES,
    PUBLISHED,
    QUARTER,
    Cell,
    First,
    Second,
    derived_cells,
    divided,
    recent,
)
from benchmarks.studies.two_stages.measure import BEHIND, IN, Needles, measure_needles
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
from benchmarks.studies.two_stages.page import cells_table, proposal
from kvc_trt.models.config import ModelConfig

NAME = "two_stages_long"
COMMAND = "python -m benchmarks.studies.two_stages.long_prompts"
MODEL = "retrieval-text"
FITTING, TOVA = First("votes", 32, 7), First("tova")
"""Stage 1 with the pool of the model's preset, whose facts are eight to ten tokens long; and TOVA's rule."""
EASY, HARD = "niah-single-1", "niah-multikey-2"
"""One needle in sentences of noise, and one in nothing but needles of other keys."""
BUDGET = BUDGETS[-1]
LONGEST = 16_384


def cells(config: ModelConfig, length: int) -> list[Cell]:
    """Return all cells for prompts of about `length` tokens."""
    found = [Cell(one, memory, size=memory) for memory in MEMORIES for one in (FITTING, PUBLISHED, TOVA)]
    for memory in MEMORIES:
        found += [divided(FITTING, share, memory, config.head_size) for share in (HALF, QUARTER, DIVIDED)]
        found.append(recent(divided(FITTING, HALF, memory, config.head_size)))
    for budget in BUDGETS:
        found += derived_cells(config, length, budget, FITTING, PUBLISHED)
    return found


NEEDLES = Needles({2048: 1.0, 4096: 1.0, 8192: 1.0, LONGEST: 1.0}, cells, (EASY, HARD))


def page(records: Sequence[Record]) -> Written:
    """Write the page."""
    every, head = records, records[0]["key"]
    longest = {of: by_needle(of_kind(records, task=of, length=LONGEST)) for of in NEEDLES.tasks}
    by_task = {of: [Measured(some, place) for place in PLACES] for of, some in longest.items()}
    parts = [
        f"# Study: both stages of RocketKV on {LONGEST:,} tokens",
        written_by(COMMAND),
        paragraph(
            f"[Two stages](two-stages.md) asks where RocketKV wins on SmolLM2, up to its 8,192 tokens. This page asks "
            f"on {LONGEST:,} tokens, of the shipped `{MODEL}` trained further (`training/retrieval_text/lengthen.py`): "
            "a model of a million parameters that answers questions about needles and knows nothing else. So it says "
            "what eviction and selection lose, not how well a large model answers. `niah-single-1` hides one needle in "
            "sentences of noise; `niah-multikey-2` hides it among needles of other keys, all alike until the "
            "question comes. The question stands in the prompt, where stage 1 sees it, or behind it."
        ),
        overview([_memory(by_task), _easier(by_task), _outperforms(by_task), _last_tokens(by_task)]),
        paragraph(_follows(by_task)),
        paragraph(
            "Differences are means over needles of the longest prompts. *Nats* are the divergence of the next token's "
            "distribution from the whole cache's, along the true answer: 0 is the whole cache, and lower is better. "
            f"Stage 1 has the pool of the model's preset, {FITTING.pool}, where nothing else is said."
        ),
        "## By length",
        paragraph(
            f"Nats of budget {BUDGET}: `{ADAPTIVE}`, its stage 1 alone with as many pairs as it stores and with as "
            "many as it reads, and hybrid attention over the whole prompt."
        ),
        _by_length(records),
    ]
    images = {}
    for of, both in by_task.items():
        name = image(NAME, of)
        parts += [f"## {of}, {LONGEST:,} tokens", plot(name, STUDY.path), *proposal(both)[:2], cells_table(both)]
        images[name] = _plot(of, both)
    parts += [
        "## How it was measured",
        paragraph(
            f"{head['model']} trained further by `python -m training.retrieval_text.lengthen --output DIR`, which the "
            f"study is given as `--checkpoint DIR`; 32-bit floats; {len(longest[EASY])} needles of each task and "
            "length. Another machine trains a model of slightly other weights. Everything else is as "
            "[there](two-stages.md#how-it-was-measured). "
            f"{measured_on(every, NAME, COMMAND)}."
        ),
    ]
    return Written("\n\n".join(parts) + "\n", images)


ByTask = dict[str, list[Measured]]


def _said(by_task: ByTask, of_place: Callable[[Measured], str]) -> str:
    return "; ".join(f"{of}, question {one.place}: {of_place(one)}" for of, both in by_task.items() for one in both)


def _memory(by_task: ByTask) -> Finding:
    def less(one: Measured) -> list[Estimate]:
        return [one.less(with_stage_2(FITTING, HALF, size), alone(FITTING, size)) for size in MEMORIES]

    found = [one for both in by_task.values() for place in both for one in less(place)]
    return Finding(
        "This project's question: at equal bytes in memory, are both stages better than the first alone?",
        f"1/2 read, with {', '.join(map(str, MEMORIES))} pairs: "
        + _said(by_task, lambda one: ", ".join(map(nats, less(one)))),
        found[0].count,
        verdict(*(one.high < 0 for one in found)),
    )


def _follows(by_task: ByTask) -> str:
    """Say what both stages win and lose, at the least memory and reads that were measured."""
    both, first = with_stage_2(FITTING, QUARTER, MEMORIES[0]), alone(FITTING, MEMORIES[0])
    selected = selecting("hybrid", BUDGET)
    said = []
    for of, places in by_task.items():
        asked = next(one for one in places if one.place == IN)
        said.append(
            f"{of}: {interval(asked.estimate(both))} nats with {asked.mean(both, 'stored'):,.0f} pairs stored and "
            f"{asked.mean(both, 'read'):,.0f} read, {interval(asked.estimate(first))} with stage 1 alone, which reads "
            f"{asked.mean(first, 'read'):,.0f}, and {interval(asked.estimate(selected))} with hybrid attention over "
            f"the whole prompt, which reads {asked.mean(selected, 'read'):,.0f}"
        )
    behind = min(
        one.mean(derived(ADAPTIVE, BUDGET, first=FITTING), "divergence")
        for places in by_task.values() for one in places if one.place == BEHIND
    )  # fmt: skip
    return (
        "Where stage 1 has seen the question, both stages together lose what stage 1 loses and read less. "
        + "; ".join(said)
        + f". Where it has not, both lose the needle: `{ADAPTIVE}`, budget {BUDGET}, is {behind:.1f} nats away or more."
    )


def _easier(by_task: ByTask) -> Finding:
    def less(one: Measured) -> Estimate:
        return one.less(derived(ADAPTIVE, BUDGET, first=FITTING), selecting("hybrid", BUDGET))

    found = [less(one) for both in by_task.values() for one in both]
    return Finding(
        'Selecting among what is left "significantly" lowers "the prediction difficulty" (section 3.1)',
        f"budget {BUDGET}, beside hybrid attention over the whole prompt: "
        + _said(by_task, lambda one: nats(less(one))),
        found[0].count,
        verdict(*(one.high < 0 for one in found)),
    )


def _outperforms(by_task: ByTask) -> Finding:
    rivals = {
        "its stage 1 alone": alone(FITTING, BUDGET), "TOVA": alone(TOVA, BUDGET),
        "Quest": selecting("quest-matched", BUDGET), "SparQ": selecting("sparq", BUDGET),
    }  # fmt: skip

    def less(one: Measured) -> dict[str, Estimate]:
        return {name: one.less(derived(ADAPTIVE, BUDGET, first=FITTING), cell) for name, cell in rivals.items()}

    found = [each for both in by_task.values() for one in both for each in less(one).values()]
    return Finding(
        'At an equal token budget RocketKV "consistently outperforms all other methods" (section 4.2)',
        f"budget {BUDGET} of pairs read, beside {', '.join(rivals)}: "
        + _said(by_task, lambda one: ", ".join(map(nats, less(one).values()))),
        found[0].count,
        verdict(*(one.high < 0 for one in found)),
    )


def _last_tokens(by_task: ByTask) -> Finding:
    def less(one: Measured) -> Estimate:
        own = derived(ADAPTIVE, BUDGET, first=FITTING)
        return one.less(recent(own), own)

    found = [less(one) for both in by_task.values() for one in both]
    return Finding(
        "This project's proposal: a step reads its last 4 tokens in any case, at equal bytes",
        f"`{ADAPTIVE}`, budget {BUDGET}: " + _said(by_task, lambda one: nats(less(one))),
        found[0].count,
        verdict(*(one.high < 0.01 for one in found)),
    )


def _by_length(records: Sequence[Record]) -> str:
    rows = []
    for of in NEEDLES.tasks:
        for length in NEEDLES.lengths:
            some = by_needle(of_kind(records, task=of, length=length))
            for place in PLACES if some else ():
                at = Measured(some, place)
                own = derived(ADAPTIVE, BUDGET, first=FITTING)
                shown = (own, derived(ADAPTIVE, BUDGET, Second(), FITTING), alone(FITTING, BUDGET),
                         selecting("hybrid", BUDGET))  # fmt: skip
                whole = sum(one["measured"][place]["whole"] for one in some)
                rows.append([
                    of, f"{length:,}", place, str(len(some)), str(whole), f"{at.mean(own, 'stored'):,.0f}",
                    *(interval(at.estimate(cell)) for cell in shown),
                ])  # fmt: skip
    heads = ("task", "tokens", "question", "n", "found by the whole cache", "pairs stored", f"`{ADAPTIVE}`",
             "its stage 1 alone, as many stored", "stage 1 alone, as many read", "hybrid alone")  # fmt: skip
    return table(heads, rows)


def _plot(of: str, both: Sequence[Measured]) -> bytes:
    shown: dict[str, Callable[[int], Cell]] = {
        "TOVA": lambda size: alone(TOVA, size),
        "pool 63, alone": lambda size: alone(PUBLISHED, size),
        "pool 7, alone": lambda size: alone(FITTING, size),
        "pool 7, 1/2 read": lambda size: with_stage_2(FITTING, HALF, size),
        "pool 7, divided": lambda size: with_stage_2(FITTING, DIVIDED, size),
    }
    cells = {name: [cell(size) for size in MEMORIES] for name, cell in shown.items()}
    return nats_over(MEMORIES, "pairs stored by a KV head, bounds included", of, cells, both)


STUDY = Study(NAME, lambda run, kept: measure_needles(NEEDLES, run, kept), page)


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="the directory that `lengthen` wrote")
    parser.add_argument("--count", type=int, help=f"needles of each task and length ({NEEDLES.count})")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pages", action="store_true", help="measure nothing: write the page of what is there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not arguments.pages:
        if arguments.checkpoint is None:
            parser.error("--checkpoint is missing; `python -m training.retrieval_text.lengthen --output DIR` makes one")
        until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
        STUDY.measure(Run(MODEL, arguments.checkpoint, until, arguments.count), Records.of(NAME))
    print(write_page(STUDY))


if __name__ == "__main__":
    main()
