"""Ways to turn text into token ids that need no vocabulary; only how many there are matters."""

from __future__ import annotations

import re


def by_word(text: str) -> list[int]:
    """An id for a start token, for each word, each digit and each other character: similar to a BPE tokenizer."""
    return list(range(1 + len(re.findall(r"\d|[^\W\d]+|[^\w\s]|\n", text))))


def by_byte(text: str) -> list[int]:
    """Return the bytes, without a start token: prompts are as long as a tokenizer can make them."""
    return list(text.encode())
