"""Drafts of one row: before they are checked, and what a pass has stored of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Draft(NamedTuple):
    """Tokens that may follow a row's next token."""

    tokens: list[int]
    expected: float
    """The number of them that are likely to follow."""


@dataclass
class Stored:
    """Tokens that a pass stored for a row: the token that was fed and those of a draft, some of which may follow."""

    tokens: list[int]
    """The draft's."""
    answers: NDArray[np.float32]
    """[tokens, vocab]: the model's logits after each of them."""
    undo: Any
    cache_lengths: NDArray[np.int64]
    """[caches]: tokens stored before the pass."""
    kept: int = 1
    """The number of the pass's tokens that were fed."""

    @property
    def left(self) -> int:
        """Tokens that are stored and were not fed."""
        return len(self.tokens) + 1 - self.kept
