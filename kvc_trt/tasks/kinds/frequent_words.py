"""Frequent words: a text of invented words whose frequencies follow a zeta law. Which three are the most frequent?

RULER's `fwe` [1] in our own words: of T draws the word of rank i takes floor(T / (i^2 zeta(2))), in random order; rank
one is printed as dots, which are to be ignored, and ranks two to four are asked for. T is as large as the target
allows, and at least 53: below, two of the five ranks could be equally frequent.

[1] C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv:2404.06654.
"""

from __future__ import annotations

import math
from string import ascii_lowercase
from typing import Any

import numpy as np

from kvc_trt.tasks.haystack import fit_units
from kvc_trt.tasks.task import MATCH_ALL, Encode, Task, TaskSample, sample_rng, string_match_all
from kvc_trt.tasks.words import spelled

NAME = "frequent-words"
MAX_NEW_TOKENS = 50
LETTERS = 6
TOKENS_PER_WORD = 50
FEWEST_DRAWS = 53
ASKED = 3
DOTS = "..."

INSTRUCTION = "Below is a coded text. Count how often each coded word appears; the dots mean nothing.\n\n"
QUESTION = "\n\nWhich three coded words, dots aside, appear most often? They are"


def generate(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> TaskSample:
    """Sample `index`; its vocabulary has one word for every fifty tokens of the target, and at least five."""
    rng = sample_rng(NAME, seed, index)
    ranks = max(1 + ASKED + 1, target_tokens // TOKENS_PER_WORD)
    words = [DOTS, *_distinct_words(rng, ranks - 1)]

    def context(draws: int) -> str:
        text = np.repeat(np.arange(ranks), rank_counts(draws, ranks))
        order = sample_rng(f"{NAME}/order", seed, index).permutation(text)
        return INSTRUCTION + " ".join(words[rank] for rank in order)

    draws = fit_units(
        lambda count: context(count) + QUESTION,
        task=NAME,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
        minimum=FEWEST_DRAWS,
    )
    counts = rank_counts(draws, ranks)[1 : 1 + ASKED]
    meta = {"draws": draws, "vocabulary": ranks, "counts": counts.tolist()}
    return TaskSample(NAME, seed, index, context(draws), QUESTION, tuple(words[1 : 1 + ASKED]), meta)


def rank_counts(draws: int, ranks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of times that the words of rank 1, 2, ... appear among `draws` words; int64 [ranks]."""
    zeta = math.pi**2 / 6
    return np.floor(draws / (np.arange(1, ranks + 1) ** 2 * zeta)).astype(np.int64)


def _distinct_words(rng: np.random.Generator, count: int) -> list[str]:
    numbers = rng.choice(len(ascii_lowercase) ** LETTERS, size=count, replace=False)
    return [spelled(number, LETTERS) for number in numbers.tolist()]


TASKS = (
    Task(
        NAME,
        "aggregation",
        "the three most frequent coded words",
        MAX_NEW_TOKENS,
        generate,
        string_match_all,
        MATCH_ALL,
    ),
)
