"""The requests: prompts of mixed lengths as token ids, and how many tokens each answer has."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.machine import ROOT

if TYPE_CHECKING:
    from kvc_trt import Engine

_LOG = ROOT / "docs" / "demo" / "harbour-log.txt"
_QUESTIONS = (
    "What was oiled and tested?",
    "Which vessels left, and in what weather?",
    "Summarise the log in three sentences.",
    "Who signed the log, and what did they ask for?",
)
_WORDS = ("amber", "lamp", "scarlet", "tiger", "lagos", "eight", "bear", "hanoi", "fourteen")


@dataclass(frozen=True)
class Asked:
    """One request. Its answer always has `max_tokens` tokens: an end token does not end it."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Shape:
    """The shape of a load: each range from its first to its last value."""

    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    distinct: int
    """The number of different requests; they repeat in the same order."""


def requests(engine: Engine, shape: Shape, seed: int = 0) -> list[Asked]:
    """Return the different requests of a load; lengths are spread evenly over their logarithms."""
    draw = random.Random(seed)
    low, high = shape.prompt_tokens
    lengths = [round(low * (high / low) ** (place / max(1, shape.distinct - 1))) for place in range(shape.distinct)]
    draw.shuffle(lengths)
    prompt = _words if engine.directory.chat_template is None else _question
    return [Asked(prompt(engine, length, draw), draw.randint(*shape.answer_tokens)) for length in lengths]


def digest(asked: list[Asked]) -> str:
    """Return a digest of the requests, by which answers are matched to them."""
    listed = [[list(one.prompt), one.max_tokens] for one in asked]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def _question(engine: Engine, tokens: int, draw: random.Random) -> tuple[int, ...]:
    """Return a chat prompt of at most `tokens` tokens: a part of a log, and a question about it."""
    lines = _LOG.read_text(encoding="utf-8").splitlines()
    begin, question = draw.randrange(len(lines)), draw.choice(_QUESTIONS)
    lines = lines[begin:] + lines[:begin]

    def prompt(count: int) -> tuple[int, ...]:
        text = "\n".join([*lines[:count], "", question])
        return tuple(engine.chat_prompt([{"role": "user", "content": text}]))

    most, least = len(lines), 0
    while least < most:  # the most lines that fit
        count = (least + most + 1) // 2
        least, most = (count, most) if len(prompt(count)) <= tokens else (least, count - 1)
    return prompt(least)


def _words(engine: Engine, tokens: int, draw: random.Random) -> tuple[int, ...]:
    """Return `tokens` tokens of words that the shipped model knows, with a record and its query."""
    key, *value = draw.sample(_WORDS[1:], 5)
    tokenizer = engine.directory.tokenizer
    assert tokenizer is not None, "it is a shipped model"
    record = tokenizer.encode(f"<record> {key} {' '.join(value)}").ids
    query = tokenizer.encode(f"<query> {key}").ids
    start = tokenizer.encode("").ids
    record, query = record[len(start) :], query[len(start) :]
    filler = tokenizer.encode(_WORDS[0]).ids[len(start) :]
    count = max(0, (tokens - len(start) - len(record) - len(query)) // len(filler))
    return (*start, *record, *filler * count, *query)
