"""Sets of token ids as packed bits: a few kilobytes to copy to a device for each step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32
Words = NDArray[np.uint32]
"""[ceil(vocab / 32)]: bit i of word w is token 32 * w + i; bits past the vocabulary are 0."""


def words_of(vocab_size: int) -> int:
    """Return the number of words that hold one bit per token of a vocabulary."""
    return -(-vocab_size // WORD_BITS)


def packed(tokens: NDArray[np.bool_]) -> Words:
    """Return the mask `tokens` [vocab] packed into words."""
    padded = np.zeros(words_of(len(tokens)) * WORD_BITS, np.bool_)
    padded[: len(tokens)] = tokens
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32, copy=False)


class TokenBits:
    """A set of token ids that grows."""

    def __init__(self, words: Words | None = None) -> None:
        self._words: Words = np.zeros(0, np.uint32) if words is None else words

    def __bool__(self) -> bool:
        """True unless it is empty."""
        return bool(self._words.any())

    def add(self, token_ids: Iterable[int]) -> None:
        """Add token ids, none of them negative."""
        ids = np.fromiter(token_ids, np.int64)
        if not len(ids):
            return
        if (needed := words_of(int(ids.max()) + 1)) > len(self._words):
            self._words = self.words(needed)
        np.bitwise_or.at(self._words, ids // WORD_BITS, np.uint32(1) << (ids % WORD_BITS).astype(np.uint32))

    def ids(self) -> NDArray[np.int64]:
        """Return the ids, ascending."""
        bits = np.unpackbits(self._words.astype("<u4", copy=False).view(np.uint8), bitorder="little")
        return np.flatnonzero(bits)

    def words(self, count: int) -> Words:
        """Return the set as `count` new words; `count` must cover the largest id."""
        found = np.zeros(count, np.uint32)
        found[: len(self._words)] = self._words
        return found

    def copy(self) -> TokenBits:
        """Return an independent copy."""
        return TokenBits(self._words.copy())
