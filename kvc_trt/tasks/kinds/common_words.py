"""Common words: a long numbered list in random order. Which ten words appear in it most often?

RULER's `cwe` [1] in our own words: ten words thirty times each, all others three times (six times and once where the
target is below 4,096 tokens), after a short solved example. Words are our own lists; where they end, invented ones
follow. Unlike the original's, the example shares no word with the question, so nothing it says is a false answer.

[1] C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv:2404.06654.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvc_trt.tasks.haystack import FirstItems, fit_units
from kvc_trt.tasks.task import MATCH_ALL, Encode, Task, TaskSample, sample_rng, string_match_all
from kvc_trt.tasks.words import word_stream

NAME = "common-words"
MAX_NEW_TOKENS = 120
COMMON = 10

INSTRUCTION = "Here is a numbered list of words. Some words come up far more often than the others.\n\n"
QUESTION = "\n\nWhich ten words come up most often in the list? They are"


@dataclass(frozen=True)
class _Repeats:
    """The repetitions of words in the list and in the solved example, and the number of the example's other words."""

    common: int
    other: int
    example_common: int
    example_other: int
    example_others: int


SHORT_TARGET = 4096
SHORT = _Repeats(common=6, other=1, example_common=3, example_other=1, example_others=10)
LONG = _Repeats(common=30, other=3, example_common=10, example_other=3, example_others=30)


def generate(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> TaskSample:
    """Sample `index`; the number of other words grows with the target."""
    repeats = SHORT if target_tokens < SHORT_TARGET else LONG
    drawn = FirstItems(word_stream(sample_rng(NAME, seed, index)))
    shown_words = COMMON + repeats.example_others
    words = drawn.first(shown_words + COMMON)
    common = words[shown_words:]

    def listed(part: str, frequent: Sequence[str], often: int, others: Sequence[str], seldom: int) -> str:
        entries = list(frequent) * often + list(others) * seldom
        order = sample_rng(f"{NAME}/{part}", seed, index).permutation(len(entries))
        return INSTRUCTION + " ".join(f"{i}. {entries[entry]}" for i, entry in enumerate(order, start=1))

    shown = listed("example", words[:COMMON], repeats.example_common, words[COMMON:shown_words], repeats.example_other)
    example = f"{shown}{QUESTION} {', '.join(words[:COMMON])}.\n\n\n"

    def context(others: int) -> str:
        rest = drawn.first(len(words) + others)[len(words) :]
        return example + listed("question", common, repeats.common, rest, repeats.other)

    others = fit_units(
        lambda count: context(count) + QUESTION,
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
    )
    meta = {"common_repeats": repeats.common, "other_words": others, "other_repeats": repeats.other}
    return TaskSample(NAME, seed, index, context(others), QUESTION, tuple(common), meta)


TASKS = (
    Task(
        NAME,
        "aggregation",
        "the ten words that a numbered list repeats most",
        MAX_NEW_TOKENS,
        generate,
        string_match_all,
        MATCH_ALL,
    ),
)
