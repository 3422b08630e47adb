"""The rules by which one row's next token is drawn from its logits, as numbers and arrays for a device."""

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
    """[n]: ids of the tokens with a bias or a penalty; an id may occur twice."""
    added: NDArray[np.float32]
    """[n]: biases of the `changed` tokens, added before the repetition penalty."""
    subtracted: NDArray[np.float32]
    """[n]: presence and frequency penalties of the `changed` tokens, subtracted after the repetition penalty."""
    read: Words | None = None
    """The tokens of the text, whose logits the repetition penalty changes; None if it changes none."""
    allowed: Words | None = None
    """The tokens that may be drawn; None if all may."""
    logprobs: int | None = None
    """The number of best tokens whose log-probabilities are returned beside the drawn token's; None returns none."""

    @property
    def changes_logits(self) -> bool:
        """True if biases, penalties, bans or a grammar change the logits before the draw."""
        return bool(len(self.changed)) or self.read is not None or self.allowed is not None

    @property
    def filters(self) -> bool:
        """True if the draw needs the tokens sorted by probability: it samples with top-k or top-p."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0)
