"""Multi-query associative recall: pairs of token ids, then some of their keys again. Which value belongs to each?

MQAR of Zoology [1], for a compressed cache. The context is k1 v1 k2 v2 ... and filler; the question is a section of
slots of two tokens, in which every asked key appears once, at the start of a slot. The slot is drawn with weight
j^(a - 1), a = 0.01, so that queries crowd at the beginning as words recur in text. A prediction is the argmax at a key
of the question, which is fed token by token: teacher-forced, so an early mistake spoils no later answer.

Two cases, in the terms of every task: queries **in decode** only (query-agnostic), and queries **in the window** as
well (query-aware: the prompt ends with the section, and decode is fed it once more). The original scores the first
pass; prefill is dense under every policy, so that pass would say nothing about a cache.

Filler has ids of its own. In the original it is drawn from the whole vocabulary and can show a key with another value.
Keys are 1 .. 3V/8 - 1, values 3V/8 .. 3V/4 - 1, filler 3V/4 .. V - 1; 0 is never used. Texts are decimal ids between
spaces, so that data sets look like those of the other tasks.

[1] S. Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", arXiv:2312.04927.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvc_trt.errors import InputError
from kvc_trt.tasks.task import Encode, Task, TaskSample, position_match, sample_rng

NAME = "associative-recall"
SECTION_TOKENS = 32
"""Tokens of the question: no more than the usual observation window."""
SLOTS = SECTION_TOKENS // 2
ASKED = 8
POWER = 0.01
VOCABULARY_SIZE = 8192
LARGEST_VOCABULARY = 2**31 - 1


def generate(
    *,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode | None = None,
    max_new_tokens: int = SECTION_TOKENS,
    vocabulary_size: int = VOCABULARY_SIZE,
    pairs: int | None = None,
    asked: int = ASKED,
) -> TaskSample:
    """Sample `index`, `asked` of `pairs` keys; ids are below `vocabulary_size`, and `encode` is not used.

    Without `pairs` there are as many as fill half of the context, the vocabulary permitting. The answers are the values
    in the order of the question; `meta["asked_offsets"]` says at which of its tokens they are predicted.
    """
    keys, values, filler = _id_ranges(vocabulary_size, asked)
    length = target_tokens - max_new_tokens - SECTION_TOKENS
    length -= length % 2
    if pairs is None:
        pairs = max(asked, min(length // 4, len(keys)))
    _require_fit(length, pairs, asked, len(keys), max_new_tokens)

    rng = sample_rng(NAME, seed, index)
    known = np.column_stack([ids.start + rng.choice(len(ids), size=pairs, replace=False) for ids in (keys, values)])
    context = rng.integers(filler.start, filler.stop, size=length)
    context[: 2 * pairs] = known.reshape(-1)

    chosen = rng.choice(pairs, size=asked, replace=False)
    weights = np.arange(1, SLOTS + 1) ** (POWER - 1.0)
    offsets = 2 * rng.choice(SLOTS, size=asked, replace=False, p=weights / weights.sum())
    section = rng.integers(filler.start, filler.stop, size=SECTION_TOKENS)
    section[offsets] = known[chosen, 0]

    order = np.argsort(offsets)
    answers = tuple(str(value) for value in known[chosen[order], 1])
    meta = {"pairs": pairs, "vocabulary_size": vocabulary_size, "asked_offsets": np.sort(offsets).tolist()}
    return TaskSample(NAME, seed, index, _text(context), " " + _text(section), answers, meta)


def ids_of(text: str) -> list[int]:
    """The token ids of a text of this task."""
    return [int(word) for word in text.split()]


def _text(ids: Sequence[int] | np.ndarray[Any, Any]) -> str:
    return " ".join(map(str, ids))


def _id_ranges(vocabulary_size: int, asked: int) -> tuple[range, range, range]:
    """Ids of keys, values and filler; there are never fewer values than keys."""
    if not 1 <= vocabulary_size <= LARGEST_VOCABULARY:
        raise InputError(f"{NAME}: a vocabulary of {vocabulary_size} ids, expected 1 to {LARGEST_VOCABULARY}")
    first_value, first_filler = 3 * vocabulary_size // 8, 3 * vocabulary_size // 4
    keys = range(1, first_value)
    if not 1 <= asked <= SLOTS:
        raise InputError(f"{NAME}: {asked} keys are asked, expected 1 to {SLOTS}")
    if len(keys) < asked:
        raise InputError(f"{NAME}: a vocabulary of {vocabulary_size} ids has {len(keys)} keys, {asked} are asked")
    return keys, range(first_value, first_filler), range(first_filler, vocabulary_size)


def _require_fit(length: int, pairs: int, asked: int, keys: int, decode_tokens: int) -> None:
    if not asked <= pairs <= keys:
        raise InputError(f"{NAME}: {pairs} pairs, expected {asked} (all are asked) to {keys} (keys are distinct)")
    if length < 4 * pairs:
        needed = 4 * pairs + SECTION_TOKENS + decode_tokens
        raise InputError(
            f"{NAME}: {pairs} pairs need a context of {4 * pairs} tokens, the target leaves {max(0, length)} (less "
            f"{SECTION_TOKENS} for the question and {decode_tokens} for decode)",
            hint=f"use a target of at least {needed} tokens",
        )


TASKS = (
    Task(
        NAME,
        "recall",
        "the value of each of several keys, as token ids",
        SECTION_TOKENS,
        generate,
        position_match,
        "share of the keys after which the reference is predicted",
        reads="ids",
        options={"vocabulary_size": int, "pairs": int, "asked": int},
    ),
)
