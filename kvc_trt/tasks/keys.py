"""Keys and values of the text tasks: how each kind is drawn. Keys of one sample are distinct."""

from __future__ import annotations

import uuid
from typing import Literal, get_args

import numpy as np

from kvc_trt.errors import InputError
from kvc_trt.tasks.word_stream import ADJECTIVES, NOUNS

Kind = Literal["words", "numbers", "codes", "uuids"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SEVEN_DIGITS = (1_000_000, 9_999_999)
FIVE_DIGITS = (10_000, 50_000)
_LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))
_CODE_LETTERS = 6


def available(kind: Kind, numbers: tuple[int, int] = SEVEN_DIGITS) -> int:
    """How many strings of a kind there are; InputError if it is unknown."""
    if kind not in KINDS:
        raise InputError(f"kind of key is {kind!r}, expected one of {', '.join(KINDS)}")
    first, last = numbers
    counts: dict[Kind, int] = {
        "words": len(ADJECTIVES) * len(NOUNS),
        "numbers": last - first + 1,
        "codes": 26**_CODE_LETTERS,
        "uuids": 2**122,
    }
    return counts[kind]


def draw_distinct(
    rng: np.random.Generator, kind: Kind, count: int, numbers: tuple[int, int] = SEVEN_DIGITS
) -> list[str]:
    """`count` distinct strings, or all there are if they are fewer.

    `words` are adjective-noun, `numbers` of an inclusive range, `codes` of six letters, `uuids` of version 4.
    """
    count = min(count, available(kind, numbers))
    if kind == "uuids":  # 122 random bits each: distinct for all purposes
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]
    chosen = rng.choice(available(kind, numbers), size=count, replace=False).tolist()
    if kind == "words":
        return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in chosen]
    if kind == "numbers":
        return [str(numbers[0] + i) for i in chosen]
    return ["".join(_LETTERS[i // 26 ** np.arange(_CODE_LETTERS) % 26]) for i in chosen]
