"""Ways to spoil any bytes, whatever they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

LARGEST = 1 << 20
"""Bytes: mutations that grow an input stop here. What is larger on purpose is a specimen."""
_NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 32767, 65535, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 62, 1 << 63, -2)
_TEXTS = (
    b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xf0\x9f\x99\x82", b"\x1b[2J", b"\r\n", b"\\ud800", b"-1", b"1e999",
    b"NaN", b"null", b"true", b"{}", b"[]", b'"', b"../../../etc/passwd", b"/dev/zero", b"9" * 5000, b"A" * 3000,
    b"[" * 1000,
)  # fmt: skip
_DIGITS = re.compile(rb"-?\d+")


def flip_bits(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    spoiled = bytearray(content)
    for _ in range(random.randint(1, 8)):
        if spoiled:
            spoiled[random.randrange(len(spoiled))] ^= 1 << random.randrange(8)
    return bytes(spoiled)


def flip_early_bits(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    """Most formats begin with what describes the rest."""
    end = min(len(content), random.choice((16, 64, 256, 4096)))
    return flip_bits(random, content[:end], seeds) + content[end:]


def truncate(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    return content[: random.randint(0, len(content))]


def remove(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    start, stop = _range(random, content)
    return content[:start] + content[stop:]


def repeat(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    start, stop = _range(random, content)
    times = random.choice((1, 2, 3, 100))
    return (content[:stop] + content[start:stop] * times + content[stop:])[:LARGEST]


def splice(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    """Return a piece of a seed in place of a piece."""
    start, stop = _range(random, content)
    other = random.choice(seeds)
    first, last = _range(random, other)
    return (content[:start] + other[first:last] + content[stop:])[:LARGEST]


def overwrite_number(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    """Return a number of a machine's width that often bounds or counts something, anywhere."""
    width = random.choice((1, 2, 4, 8))
    value = random.choice(_NUMBERS) % (1 << 8 * width)
    start = random.randrange(len(content)) if content else 0
    return content[:start] + value.to_bytes(width, random.choice(("little", "big"))) + content[start + width :]


def overwrite_digits(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    """Return the input with a number in a text replaced by another."""
    found = list(_DIGITS.finditer(content[:LARGEST]))
    if not found:
        return overwrite_number(random, content, seeds)
    one = random.choice(found)
    return content[: one.start()] + str(random.choice(_NUMBERS)).encode() + content[one.end() :]


def insert_text(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    place = random.randint(0, len(content))
    return content[:place] + random.choice(_TEXTS) + content[place:]


def _range(random: Random, content: bytes) -> tuple[int, int]:
    start = random.randint(0, len(content))
    return start, min(len(content), start + random.choice((1, 2, 4, 8, 16, 64, 256, 4096)))


RAW = (
    flip_bits, flip_early_bits, truncate, remove, repeat, splice, overwrite_number, overwrite_digits, insert_text,
)  # fmt: skip
