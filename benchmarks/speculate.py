"""The gain of drafts on answers that copy, and their cost on answers that do not; a chat model's engine answers both.

    kvc-trt build --model smollm2-135m-instruct --policy rocketkv --token-budget 256 --max-input-len 4096 \\
        --max-output-len 256 --weights fp32 --draft-tokens 4 -o engines/drafts
    python -m benchmarks.speculate engines/drafts            # some minutes

Both sides answer the same prompts in turns, greedily, in one process. Times are from an answer's first token to its
last, so the prompt does not count. Speed-ups are those of pairs that ran one after the other. Where two answers differ,
the difference of the two best logits at that place says why (below 1e-3 rounding may decide). Wall-clock figures count
only on an idle machine, so the share of the processors that others took is written beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import store
from benchmarks.idle import Others
from kvc_trt import Engine
from kvc_trt.runtime import Event, Request

COST_BAR = 0.05
CLOSE = 1e-3
"""Difference of the two best logits below which rounding may decide."""
QUIET = 0.05
"""Share of the processors that others may take in a figure that counts."""
RECORDS = (
    "The harbour master keeps a ledger. On Monday the brig Caledonia brought 340 crates of oranges from Seville, "
    "and the captain, Ines Marchetti, signed for them at noon. On Tuesday the schooner Petrel left for Bergen with "
    "27 barrels of tar, 112 coils of rope and a piano for the opera house. On Wednesday nobody came, since the fog "
    "lay over the bay until the evening. On Thursday the lighter Anna Blume carried gravel to the new mole, eleven "
    "times."
)
JOURNEY = (
    "The train leaves Trieste at 7.15 and reaches Ljubljana before noon. There is a stop of forty minutes, in which "
    "the dining car is taken off and two sleeping cars from Zagreb are put on. After Graz the line climbs to the "
    "pass, where snow lies until May. The station master at the top keeps bees and sells honey to the passengers. "
    "In Vienna the train is divided, and the rear half goes on to Prague, which it reaches at 23.40."
)
GARDEN = (
    "In the first week of March the beds are dug over and the old leaves are carried away. Peas and broad beans go "
    "into the ground as soon as it is dry, potatoes not before the middle of April. Tomatoes are sown indoors and "
    "wait for the end of the frosts. In June the strawberries are covered with nets, since the blackbirds know "
    "every hole in the hedge. What is left in October is pulled up and the soil is covered with straw."
)
COPIES = tuple(f"Repeat the following text exactly, word by word.\n\n{text}" for text in (RECORDS, JOURNEY, GARDEN))
QUESTIONS = (
    "Write a short story about a robot who learns to paint.",
    "Explain to a child why the sky is blue and why it turns red in the evening.",
    "What should somebody think about before moving to another country for work?",
)


@dataclass(frozen=True)
class Answered:
    """One answer of one side."""

    tokens: tuple[int, ...]
    seconds: float
    """Wall time from the first token to the last."""
    processor_seconds: float
    """This process's processor time from the first token to the last; other programs hardly change it."""
    passes: int
    drafted: int
    accepted: int
    others_share: float
    """Processor time of other processes, of all there was."""


def answer(engine: Engine, prompt: list[int], tokens: int) -> Answered:
    timings = engine.session().timings
    before = asdict(timings)
    events: list[Event] = []
    first = last = own = 0.0
    others = Others()
    for event in engine.stream(prompt, max_new_tokens=tokens, ignore_eos=True):
        last = time.perf_counter()
        if not events:
            first, own, others = last, time.process_time(), Others()
        events.append(event)
    seconds, own, share = last - first, time.process_time() - own, others.share()
    after = asdict(timings)
    names = ("draft_runs", "drafted_tokens", "accepted_tokens")
    runs, drafted, accepted = (after[name] - before[name] for name in names)
    return Answered(tuple(event.token_id for event in events), seconds, own, runs, drafted, accepted, share)


def measure(path: Path, tokens: int, repeats: int, threads: int | None) -> dict[str, Any]:
    plain, speculating = (Engine.open(path, threads=threads, speculate=how) for how in (None, "ngram"))
    tasks = {"copy": COPIES, "no copies": QUESTIONS}
    prompts = {name: [plain.chat_prompt(text) for text in texts] for name, texts in tasks.items()}
    for engine in (plain, speculating):  # warms up, and passes are timed once
        answer(engine, prompts["copy"][0], min(tokens, 32))
    pairs: dict[str, list[list[tuple[Answered, Answered]]]] = {
        name: [[] for _ in of_task] for name, of_task in prompts.items()
    }
    for _ in range(repeats):
        for name, of_task in prompts.items():
            for found, prompt in zip(pairs[name], of_task, strict=True):
                found.append((answer(plain, prompt, tokens), answer(speculating, prompt, tokens)))
    parameters, model = plain.parameters, plain.model
    return {
        "engine": {
            "model": model.architecture,
            "layers": model.num_hidden_layers,
            "policy": parameters.policy,
            "token_budget": parameters.token_budget,
            "weights": plain.directory.build.weights,
            "draft_tokens": plain.directory.build.draft_tokens,
            "kernels": plain.kernels,
        },
        "answer_tokens": tokens,
        "repeats": repeats,
        "cost_bar": COST_BAR,
        "figures": [_figure(name, of_task) for name, of_task in pairs.items()],
        "prompts": [
            {"task": name, "prompt_tokens": len(prompt), **_differences(plain, prompt, found), **_runs(found)}
            for name, of_task in prompts.items()
            for prompt, found in zip(of_task, pairs[name], strict=True)
        ],
    }


def _figure(task: str, of_task: list[list[tuple[Answered, Answered]]]) -> dict[str, Any]:
    """Return the speed-up of a task: whole repeats of all its prompts, one side against the other."""
    repeats = list(zip(*of_task, strict=True))
    ratios = [sum(one.seconds for one, _ in each) / sum(other.seconds for _, other in each) for each in repeats]
    processor = [
        sum(one.processor_seconds for one, _ in each) / sum(other.processor_seconds for _, other in each)
        for each in repeats
    ]
    every = [pair for found in of_task for pair in found]
    share = max(max(one.others_share, other.others_share) for one, other in every)
    return {
        "task": task,
        "speed_up": statistics.median(ratios),
        "speed_up_range": [min(ratios), max(ratios)],
        "processor_speed_up": statistics.median(processor),
        "processor_speed_up_range": [min(processor), max(processor)],
        "cost": 1 / statistics.median(ratios) - 1,
        "tokens_per_pass": 1 + sum(other.accepted for _, other in every) / max(1, sum(o.passes for _, o in every)),
        "others_share": share,
        "measured_under_load": share > QUIET,
    }


def _runs(found: list[tuple[Answered, Answered]]) -> dict[str, Any]:
    last = found[-1][1]
    return {
        "plain_ms_per_token": [1000 * one.seconds / (len(one.tokens) - 1) for one, _ in found],
        "speculating_ms_per_token": [1000 * other.seconds / (len(other.tokens) - 1) for _, other in found],
        "passes": last.passes,
        "drafted_tokens": last.drafted,
        "accepted_tokens": last.accepted,
    }


def _differences(plain: Engine, prompt: list[int], found: list[tuple[Answered, Answered]]) -> dict[str, Any]:
    """Return the number of answers that differ, and whether rounding explains it."""
    gaps = []
    for one, other in found:
        place = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), None)
        if place is not None:
            gaps.append(_gap(plain, prompt, place))
    return {
        "answers": len(found),
        "different": len(gaps),
        "unexplained": sum(gap > CLOSE for gap in gaps),
        "gaps": gaps,
    }


def _gap(engine: Engine, prompt: list[int], place: int) -> float:
    """Return the difference of the two best logits from which token `place` of a plain answer is taken."""
    session = engine.session()
    (row,) = session.add([Request(prompt, max_new_tokens=place + 1, ignore_eos=True, keep_logits=True)])
    for _ in range(place):
        session.step()
    best = np.sort(session.take(row).logits)[-2:]
    session.remove(row)
    return float(best[1] - best[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="speculate", help="of the result")
    given = parser.parse_args()
    result = measure(given.engine, given.tokens, given.repeats, given.threads)
    for one in result["figures"]:
        low, high = one["speed_up_range"]
        print(
            f"{one['task']}: {one['speed_up']:.2f} times as fast ({low:.2f} to {high:.2f}), "
            f"{one['processor_speed_up']:.2f} by processor time, "
            f"{one['tokens_per_pass']:.1f} tokens per pass, others {one['others_share']:.0%}"
        )
    print("different answers:", sum(one["different"] for one in result["prompts"]))
    print(store.write_result(given.name, {"speculate": result}))


if __name__ == "__main__":
    main()
