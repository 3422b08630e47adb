"""Two questions about one context, the second asked after the first was answered: the cost of a conversation.

The context holds several entries; each question asks for another one. `TaskSample.question` is the second question,
whose answer is scored. Query-aware, it is asked alone, at the end of the prompt; query-agnostic, alone and late. In
the mode second-question the prompt ends with the first question, the model answers it in its own words, and the second
comes as a turn: by then a policy has evicted tokens for another question.

`two-needles` is text for any model. `two-records` are the key-value records of `retrieval-tiny`, in its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvc_trt.tasks.haystack import SHORT_SENTENCES, FirstItems, fit_units, insert_needles, repeated
from kvc_trt.tasks.kinds import key_value
from kvc_trt.tasks.kinds.needles import COUNTS, DEPTHS, INTRODUCTION, needle, question
from kvc_trt.tasks.task import MATCH_ALL, Encode, Task, TaskSample, first_question, sample_rng, string_match_all
from kvc_trt.tasks.words import draw_distinct

NEEDLES, RECORDS = "two-needles", "two-records"
ENTRIES = len(COUNTS)
"""Entries of a context of `two-needles`."""
NEEDLE_TOKENS = 24
RECORD_TOKENS = key_value.VALUES_PER_RECORD + 1
"""Four words and the end."""
RECORD_COUNT = 16


def generate_needles(
    *, seed: int, index: int, target_tokens: int, encode: Encode, max_new_tokens: int = NEEDLE_TOKENS
) -> TaskSample:
    """Sample `index`: entries with a number each in filler that repeats itself; two of them are asked for."""
    rng = sample_rng(NEEDLES, seed, index)
    keys, values = draw_distinct(rng, "words", ENTRIES), draw_distinct(rng, "numbers", ENTRIES)
    depths = sorted((rng.permutation(DEPTHS)[:ENTRIES] / (DEPTHS - 1)).tolist())
    first, second = rng.permutation(ENTRIES)[:2].tolist()
    entries = [needle(key, value) for key, value in zip(keys, values, strict=True)]
    filler = FirstItems(repeated(SHORT_SENTENCES))

    def context(units: int) -> str:
        return " ".join([INTRODUCTION, *insert_needles(filler.first(units), entries, depths)])

    asked = [question([keys[one]]) for one in (first, second)]
    units = _fit(NEEDLES, context, asked, encode, target_tokens, max_new_tokens)
    meta = {
        "depth": depths[second],
        "asked": keys[second],
        "units": units,
        **first_question(asked[0], (values[first],)),
    }
    return TaskSample(NEEDLES, seed, index, context(units), asked[1], (values[second],), meta)


def generate_records(
    *, seed: int, index: int, target_tokens: int, encode: Encode, max_new_tokens: int = RECORD_TOKENS
) -> TaskSample:
    """Sample `index`: records of four words each between words of filler; two of their keys are asked for."""
    rng = sample_rng(RECORDS, seed, index)
    keys = rng.choice(key_value.KEYS, RECORD_COUNT, replace=False).tolist()
    values = [" ".join(rng.choice(alphabet) for alphabet in key_value.VALUES) for _ in keys]
    depths = np.sort(rng.random(RECORD_COUNT)).tolist()
    first, second = rng.permutation(RECORD_COUNT)[:2].tolist()
    records = [f"<record> {key} {value}" for key, value in zip(keys, values, strict=True)]
    filler = FirstItems(_words(rng))
    asked = [f" <query> {keys[one]}" for one in (first, second)]

    def context(units: int) -> str:
        return " ".join(insert_needles(filler.first(units), records, depths))

    units = _fit(RECORDS, context, asked, encode, target_tokens, max_new_tokens)
    meta = {
        "depth": depths[second],
        "asked": keys[second],
        "units": units,
        **first_question(asked[0], (values[first],)),
    }
    return TaskSample(RECORDS, seed, index, context(units), asked[1], (values[second],), meta)


def _words(rng: np.random.Generator) -> Iterator[str]:
    """Filler without end."""
    while True:
        yield from rng.choice(key_value.FILLER, 256).tolist()


def _fit(
    task: str,
    context: Callable[[int], str],
    asked: Sequence[str],
    encode: Encode,
    target_tokens: int,
    max_new_tokens: int,
) -> int:
    """Units of the largest context to which either question can be put."""
    longest = max(asked, key=lambda text: len(encode(text)))
    return fit_units(
        lambda units: context(units) + longest,
        task=task,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
    )


def _task(name: str, summary: str, max_new_tokens: int, generate: Callable[..., TaskSample]) -> Task:
    return Task(name, "turns", summary, max_new_tokens, generate, string_match_all, MATCH_ALL, asks_twice=True)


TASKS = (
    _task(NEEDLES, "one of four numbers in filler, after another one was asked for", NEEDLE_TOKENS, generate_needles),
    _task(
        RECORDS,
        "the words of one key of many, after another one's; for retrieval-tiny",
        RECORD_TOKENS,
        generate_records,
    ),
)
