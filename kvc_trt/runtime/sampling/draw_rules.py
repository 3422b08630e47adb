"""The rules by which one row's next token is drawn from its logits, in numbers that a device can take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvc_trt.runtime.sampling.token_bits import Words


@dataclass(frozen=True)
class DrawRules:
    """The rules of one draw, in the order in which they change the logits (`Sampler`)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    uniform: float
    """The row's random number for this draw, in [0, 1)."""
    changed: NDArray[np.int64]
    """[n]: token ids; one may be there twice."""
    added: NDArray[np.float32]
    """[n]: their biases, added before the repetition penalty."""
    subtracted: NDArray[np.float32]
    """[n]: their presence and frequency penalties, subtracted after it."""
    read: Words | None = None
    """The tokens of the text, which the repetition penalty changes; None if it changes none."""
    allowed: Words | None = None
    """The tokens that may be drawn; None if all may."""
    logprobs: int | None = None
    """Return the token's log-probability, and those of so many of the best; None returns none."""

    @property
    def changes_logits(self) -> bool:
        """True if anything happens to the logits before the draw."""
        return bool(len(self.changed)) or self.read is not None or self.allowed is not None

    @property
    def filters(self) -> bool:
        """True if the draw looks at the tokens in the order of their probability."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0)
