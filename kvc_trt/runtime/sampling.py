"""Choose the next token of one row from its logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvc_trt.runtime.request import Sampling


class Sampler:
    """Draws the tokens of one row from its own random numbers, so other rows do not change the result."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always chosen."""
        return self._sampling.temperature == 0.0

    def choose(self, logits: NDArray[np.float32]) -> int:
        """Return the next token id, given `logits` [vocab] that are finite or -inf."""
        if self.is_greedy:
            return int(np.argmax(logits))
        ids, probabilities = candidates(logits, self._sampling)
        cumulative = np.cumsum(probabilities)
        drawn = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(ids[min(drawn, len(ids) - 1)])


def candidates(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the token ids that may be drawn and their probabilities (float64, not renormalised after top-p).

    Top-k comes first, then top-p over the renormalised rest. Among equal logits the lowest id is kept.
    """
    ids = np.arange(len(logits), dtype=np.int64)
    if 0 < sampling.top_k < len(ids):
        ids = _best(logits, sampling.top_k)
    scores = logits[ids].astype(np.float64)
    # The maximum is subtracted before the division: a tiny temperature then gives -inf, never inf - inf.
    with np.errstate(over="ignore"):
        probabilities = np.exp((scores - scores.max()) / sampling.temperature)
    probabilities /= probabilities.sum()
    if sampling.top_p < 1.0:
        chosen = _nucleus(probabilities, sampling.top_p)
        ids, probabilities = ids[chosen], probabilities[chosen]
    return ids, probabilities


def _best(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` best logits, ascending; among equal logits the lowest ids."""
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Return the positions of the smallest set of best probabilities that reaches `top_p`, best first."""
    # All values below (1 - top_p) / n together sum to less than 1 - top_p: they are never needed, so do not sort them.
    worth_sorting = np.flatnonzero(probabilities >= (1.0 - top_p) / len(probabilities))
    order = worth_sorting[np.argsort(-probabilities[worth_sorting], kind="stable")]
    reached = int(np.searchsorted(np.cumsum(probabilities[order]), top_p, side="left"))
    return order[: reached + 1]
