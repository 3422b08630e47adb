"""Contexts to train on, and what can be asked about them: the sentences of the tasks, as dense as a context holds.

A context has an exact number of tokens, so its first sentence may have lost its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from kvc_trt.tasks.haystack import SHORT_SENTENCES
from kvc_trt.tasks.kinds import lines, needles
from kvc_trt.tasks.kinds.key_value import BOS
from kvc_trt.tasks.words import FIVE_DIGITS, draw_distinct, prose

Kind = Literal["single", "values", "queries", "line"]
Ids = list[int]

LINE_TOKENS = 8
NEEDLE_TOKENS = 9  # one more where it says when
SENTENCE_TOKENS = 16  # about: how many sentences are drawn at a time
FEWEST_NEEDLES = 4
MOST_VALUES = MOST_QUERIES = len(needles.TIMES)
HAYSTACKS, HAYSTACK_SHARES = needles.HAYSTACKS, (0.15, 0.45, 0.4)


@dataclass(frozen=True)
class Row:
    """A context, and by kind the questions about it with their answers."""

    context: Ids
    asked: dict[Kind, list[tuple[str, str]]]


class Texts:
    """Token ids of many texts at once, without `<bos>`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """One list per text."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def lines_row(texts: Texts, rng: np.random.Generator, context: int, asked: int) -> Row:
    """Nothing but lines, `asked` of which are asked for."""
    head = [BOS, *texts.ids([lines.INTRODUCTION])[0]]
    whole = (context - len(head)) // LINE_TOKENS
    keys = draw_distinct(rng, "words", whole + 1)
    values = rng.integers(FIVE_DIGITS[0], FIVE_DIGITS[1] + 1, size=whole + 1).tolist()
    written = texts.ids([f"\n{lines.line(key, value)}" for key, value in zip(keys, values, strict=True)])
    body = [i for ids in written for i in ids][len(head) - context :]
    chosen = 1 + rng.permutation(whole)[:asked]
    return Row(head + body, {"line": [(lines.question(keys[i]), lines.answer(values[i])) for i in chosen]})


def needles_row(texts: Texts, rng: np.random.Generator, context: int, asked: dict[Kind, int]) -> Row:
    """Needles of keys with one value and with several, in any haystack; at most `asked` questions of each kind."""
    head = [BOS, *texts.ids([needles.INTRODUCTION])[0]]
    room = context - len(head)
    haystack = rng.choice(HAYSTACKS, p=HAYSTACK_SHARES)
    counts = _values_per_key(rng, room, asked["values"], full=haystack == "needles")
    keys = draw_distinct(rng, "words", len(counts))
    values = draw_distinct(rng, "numbers", sum(counts))

    read: list[list[str]] = [[] for _ in keys]
    sentences = []
    for owner, value in zip(rng.permutation(np.repeat(np.arange(len(counts)), counts)), values, strict=True):
        sentences.append(" " + needles.needle(keys[owner], value, needles.when(len(read[owner]), counts[owner])))
        read[owner].append(value)
    stream = cycle(SHORT_SENTENCES) if haystack == "noise" else prose(rng)
    body = _scatter(texts, rng, texts.ids(sentences), stream, room)

    several = [i for i, count in enumerate(counts) if count > 1]
    single = rng.permutation([i for i, count in enumerate(counts) if count == 1])
    groups = [rng.permutation(single)[: rng.integers(2, MOST_QUERIES + 1)] for _ in range(asked["queries"])]
    return Row(
        head + body,
        {
            "single": [_ask([keys[i]], read[i]) for i in single[: asked["single"]]],
            "values": [_ask([keys[i]], read[i]) for i in several],
            "queries": [_ask([keys[i] for i in group], [read[i][0] for i in group]) for group in groups],
        },
    )


def _ask(keys: list[str], values: list[str]) -> tuple[str, str]:
    values_per_key = len(values) if len(keys) == 1 else 1
    return needles.question(keys, values_per_key), needles.answer(keys, values)


def _values_per_key(rng: np.random.Generator, room: int, several: int, *, full: bool) -> list[int]:
    """How many needles each key has, those of up to `several` keys with more than one first, then at least two ones."""
    most = room // NEEDLE_TOKENS
    needed = most if full else round(np.exp(rng.uniform(np.log(min(FEWEST_NEEDLES, most)), np.log(most))))
    counts: list[int] = []
    for count in rng.integers(2, MOST_VALUES + 1, size=several).tolist():
        if sum(counts) + count + 2 <= needed:
            counts.append(count)
    timed = sum(counts)
    return counts + [1] * min(needed - timed, (room - (NEEDLE_TOKENS + 1) * timed) // NEEDLE_TOKENS)


def _scatter(texts: Texts, rng: np.random.Generator, needed: list[Ids], stream: Iterator[str], room: int) -> Ids:
    """The needles, in order, at random places among sentences of the stream; exactly `room` tokens."""
    free = room - sum(map(len, needed))
    filler: list[Ids] = []
    while free > 0:
        for ids in texts.ids([f" {text}" for text in islice(stream, 1 + free // SENTENCE_TOKENS)]):
            if free > 0:
                filler.append(ids)
                free -= len(ids)
    first = filler.pop()[-free:] if filler else []
    places = set(rng.choice(len(filler) + len(needed), size=len(needed), replace=False).tolist())
    sentence, needle = iter(filler), iter(needed)
    units = [next(needle) if place in places else next(sentence) for place in range(len(filler) + len(needed))]
    return first + [i for ids in units for i in ids]
