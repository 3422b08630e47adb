"""Variable tracking: one chain of assignments, four hops, scattered over filler. Which variables hold the number?

RULER's `vt` [1] in our own words: the first of five names is given a five-digit number, each of the others the one
before it, in order, at random gaps. A short solved example comes first. Only the number is asked for, so all five
names have to be traced from it.

[1] C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv:2404.06654.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np

from kvc_trt.tasks.haystack import SHORT_SENTENCES, FirstItems, fit_units, insert_needles, repeated
from kvc_trt.tasks.task import MATCH_ALL, Encode, Task, TaskSample, sample_rng, string_match_all
from kvc_trt.tasks.words import spelled

NAME = "variable-tracking"
MAX_NEW_TOKENS = 30
HOPS = 4
LETTERS = 5
EXAMPLE_TOKENS = 500
EXAMPLE_SENTENCES = 10

INSTRUCTION = "The text below sets variables to values, or to the value of another variable. Follow them.\n\n"


@dataclass(frozen=True)
class _Chain:
    names: tuple[str, ...]
    number: int
    depths: tuple[float, ...]

    def statements(self) -> list[str]:
        first, *_ = self.names
        copies = [f"SET {name} = {source}." for source, name in zip(self.names, self.names[1:], strict=False)]
        return [f"SET {first} = {self.number}.", *copies]

    def context(self, units: Sequence[str]) -> str:
        return INSTRUCTION + " ".join(insert_needles(units, self.statements(), self.depths))

    def question(self) -> str:
        return f"\n\nWhich {len(self.names)} variables have the value {self.number}? They are"


def generate(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> TaskSample:
    """Sample `index`; InputError also where the solved example alone is longer than 500 tokens."""
    rng = sample_rng(NAME, seed, index)
    names = _distinct_names(rng, 2 * (HOPS + 1))
    numbers = [10_000 + int(number) for number in rng.choice(90_000, size=2, replace=False)]
    shown, asked = _chain(rng, names[: HOPS + 1], numbers[0]), _chain(rng, names[HOPS + 1 :], numbers[1])
    filler = FirstItems(repeated(SHORT_SENTENCES))

    def example(sentences: int) -> str:
        return f"{shown.context(filler.first(sentences))}{shown.question()} {', '.join(shown.names)}.\n\n\n"

    solved = example(
        fit_units(
            example,
            task=f"{NAME} (its solved example)",
            encode=encode,
            target_tokens=EXAMPLE_TOKENS,
            max_new_tokens=0,
            minimum=0,
            maximum=EXAMPLE_SENTENCES,
        )
    )

    def context(sentences: int) -> str:
        return solved + asked.context(filler.first(sentences))

    sentences = fit_units(
        lambda count: context(count) + asked.question(),
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
        minimum=0,
    )
    meta = {"sentences": sentences, "number": asked.number, "depths": list(asked.depths)}
    return TaskSample(NAME, seed, index, context(sentences), asked.question(), asked.names, meta)


def _chain(rng: np.random.Generator, names: Sequence[str], number: int) -> _Chain:
    depths = np.sort(rng.random(len(names)))
    return _Chain(tuple(names), number, tuple(float(depth) for depth in depths))


def _distinct_names(rng: np.random.Generator, count: int) -> list[str]:
    """Distinct words of five capital letters."""
    numbers = rng.choice(len(ascii_uppercase) ** LETTERS, size=count, replace=False)
    return [spelled(number, LETTERS, ascii_uppercase) for number in numbers.tolist()]


TASKS = (
    Task(
        NAME,
        "tracing",
        "all variables of a chain of assignments over four hops",
        MAX_NEW_TOKENS,
        generate,
        string_match_all,
        MATCH_ALL,
    ),
)
