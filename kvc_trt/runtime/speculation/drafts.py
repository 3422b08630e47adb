"""Drafts of one row: before they are checked, and what a pass has stored of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvc_trt.runtime.executor import Answer


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
    answers: Sequence[Answer]
    """The model's answer after each of them."""
    undo: Any
    cache_lengths: NDArray[np.int64]
    """[caches]: tokens stored before the pass."""
    kept: int = 1
    """The number of the pass's tokens that were fed."""

    @property
    def left(self) -> int:
        """Tokens that are stored and were not fed."""
        return len(self.tokens) + 1 - self.kept
