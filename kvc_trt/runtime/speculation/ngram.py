"""Drafts from the text itself: what followed the last tokens when they occurred before (prompt lookup)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SHORTEST, LONGEST = 2, 8
"""Fewest and most tokens that have to occur twice; among places that repeat as many the latest is taken."""
WEIGHT = 0.25
"""Weight of the latest draft in the expected number of accepted tokens."""


class NgramText:
    """The tokens that one row has read, prompt and answers, whatever its cache has kept of them.

    It also watches how its drafts fare, used or not: the row says what really came.
    """

    def __init__(self) -> None:
        self._tokens: NDArray[np.int32] = np.empty(1024, np.int32)
        self._count = 0
        self._watched: deque[int] = deque()
        self._matched = 0
        self.expected = 0.0
        """Tokens of a draft that the text confirms, on average over the latest ones."""

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens that were given, not drafted."""
        self._watched.clear()
        self._append(tokens)

    def feed(self, token: int) -> None:
        """Append a token that followed, and compare it with the draft that is watched."""
        self._append([token])
        if not self._watched:
            return
        if self._watched.popleft() == token:
            self._matched += 1
            if self._watched:
                return
        self._watched.clear()
        self.expected += WEIGHT * (self._matched - self.expected)

    def draft(self, unfed: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that may follow the text and `unfed`; none if its end has not occurred before."""
        end = self._count + len(unfed)
        self._reserve(end)
        self._tokens[self._count : end] = unfed
        text = self._tokens[:end]
        if end <= SHORTEST:
            return []
        ends = np.flatnonzero((text[1:-1] == text[-1]) & (text[:-2] == text[-2])) + 1
        for length in range(SHORTEST + 1, LONGEST + 1):
            longer = ends[ends >= length - 1]
            longer = longer[text[longer - (length - 1)] == text[-length]] if end > length else longer[:0]
            if not len(longer):
                break
            ends = longer
        if not len(ends):
            return []
        start = int(ends[-1]) + 1
        found: list[int] = text[start : start + count].tolist()
        while len(found) < count:  # the text goes round in a circle
            found.append(found[len(found) - (end - start)])
        return found

    def watch(self, unfed: Sequence[int], draft: Sequence[int]) -> None:
        """Compare what follows `unfed`, which is fed next, with a draft, unless one is watched already."""
        if draft and not self._watched:
            self._watched.extend((*unfed, *draft))
            self._matched = -len(unfed)

    def _append(self, tokens: Sequence[int]) -> None:
        self._reserve(self._count + len(tokens))
        self._tokens[self._count : self._count + len(tokens)] = tokens
        self._count += len(tokens)

    def _reserve(self, count: int) -> None:
        if count > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(count, np.int32)])
