"""Drafts from the text itself (prompt lookup): the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SHORTEST, LONGEST = 2, 8
"""The fewest and the most last tokens that are looked up; of several earlier places with equally long matches, the
latest is taken."""
WEIGHT = 0.25
"""The weight of the latest draft in the moving average of accepted tokens."""


class NgramText:
    """The tokens that one row has read, prompt and answers, including those that its caches have dropped.

    It also compares its drafts, used or not, with the tokens that really follow.
    """

    def __init__(self) -> None:
        self._tokens: NDArray[np.int32] = np.empty(1024, np.int32)
        self._count = 0
        self._watched: deque[int] = deque()
        self._matched = 0
        self.expected = 0.0
        """The moving average of the number of a draft's tokens that really followed."""

    def read(self, tokens: Sequence[int]) -> None:
        """Append given tokens, such as a prompt's; the watched draft is dropped."""
        self._watched.clear()
        self._append(tokens)

    def feed(self, token: int) -> None:
        """Append a token that was fed, and compare it with the watched draft."""
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
        while len(found) < count:  # the draft reaches the end of the text: continue with the draft's own tokens
            found.append(found[len(found) - (end - start)])
        return found

    def watch(self, unfed: Sequence[int], draft: Sequence[int]) -> None:
        """Watch a draft for the tokens after `unfed`, which are fed next, unless one is being watched."""
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
