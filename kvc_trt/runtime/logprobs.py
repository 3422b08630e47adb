"""Log-probabilities of an answer's tokens under the model's own distribution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot hold, as in OpenAI's API."""
MOST = 20
"""The most tokens of one step whose log-probabilities a request can ask for, as in OpenAI's API."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the probabilities of tokens at one step.

    They are those of the model, before penalties, bans and temperature, as vLLM returns them by default, regardless of
    the rules by which the token was drawn.
    """

    logprob: float
    """The log-probability of the drawn token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, best first; the lowest id first among equals."""


def token_logprobs(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """Return the log-probabilities of a token and of the `count` best ones, given finite or -inf `logits` [vocab]."""
    best = float(logits.max())
    total = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
    ids = best_ids(logits, count) if count else np.empty(0, np.int64)
    ordered = ids[np.argsort(-logits[ids], kind="stable")]
    top = tuple((int(one), float(logits[one]) - total) for one in ordered if np.isfinite(logits[one]))
    return TokenLogprobs(max(float(logits[token_id]) - total, LEAST), top)


def best_ids(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` largest logits, in ascending order; among equal logits the lowest ids."""
    if count >= len(logits):
        return np.arange(len(logits), dtype=np.int64)
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))
