"""Log-probabilities of the tokens of an answer, under the model's own distribution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot hold, as in OpenAI's API."""
MOST = 20
"""Most tokens of one step that a request can ask for: what OpenAI's API allows."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one step.

    They are the model's, before penalties, banned tokens and temperature, as vLLM gives them by default: how likely
    the model itself took the token, however it was drawn.
    """

    logprob: float
    """Of the token that was drawn."""
    top: tuple[tuple[int, float], ...]
    """(token id, its logarithm) of the most likely tokens, best first; the lowest id first among equals."""


def token_logprobs(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """Return the log-probability of a token and of the `count` best ones, given finite or -inf `logits` [vocab]."""
    best = float(logits.max())
    total = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
    ids = best_ids(logits, count) if count else np.empty(0, np.int64)
    ordered = ids[np.argsort(-logits[ids], kind="stable")]
    top = tuple((int(one), float(logits[one]) - total) for one in ordered if np.isfinite(logits[one]))
    return TokenLogprobs(max(float(logits[token_id]) - total, LEAST), top)


def best_ids(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` best logits, ascending; among equal logits the lowest ids."""
    if count >= len(logits):
        return np.arange(len(logits), dtype=np.int64)
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))
