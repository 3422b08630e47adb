"""The draft of one row: its tokens before they are checked, and its stored tokens after a pass."""

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
    """The number of these tokens that are expected to be accepted."""


@dataclass
class StoredDraft:
    """The tokens that a pass stored for a row: the token that was fed, and those of a draft, not yet accepted."""

    tokens: list[int]
    """The tokens of the draft."""
    answers: Sequence[Answer]
    """The model's output after each token of the draft."""
    undo: Any
    """The row's data for `DraftExecutor.take_back`."""
    cache_lengths: NDArray[np.int64]
    """[caches]: the number of tokens stored before the pass."""
    kept: int = 1
    """The number of stored tokens that count as fed: the first one, and accepted tokens of the draft."""

    @property
    def left(self) -> int:
        """The number of stored tokens that do not count as fed."""
        return len(self.tokens) + 1 - self.kept
