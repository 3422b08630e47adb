"""How closely a compressed cache follows the whole one where no answer is known to be right.

Both are fed the same tokens, one per step, and their distributions of the next token are compared. This needs no
labels: it says what compression changes, not whether the model was right before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
"""Draws of a bootstrap interval."""


@dataclass(frozen=True)
class Faithfulness:
    """One prompt's comparison with the whole cache."""

    divergence: float
    """Mean KL(whole || compressed), in nats per token."""
    equal: float
    """Share of the tokens for which both find the same one most likely."""
    first_difference: int | None
    """The first token for which they do not; None if there is none."""


def compare(whole: NDArray[np.float32], compressed: NDArray[np.float32]) -> Faithfulness:
    """Compare the logits [N,vocab] of N tokens, in float64. ValueError for other shapes."""
    if whole.shape != compressed.shape or whole.ndim != 2 or not len(whole):
        raise ValueError(f"expected logits [N,vocab] of the same tokens, found {whole.shape} and {compressed.shape}")
    divergences = np.empty(len(whole))
    for place, (one, other) in enumerate(zip(whole, compressed, strict=True)):
        p, q = _log_probabilities(one), _log_probabilities(other)
        divergences[place] = max(0.0, float((np.exp(p) * (p - q)).sum()))
    differs = np.flatnonzero(whole.argmax(-1) != compressed.argmax(-1))
    first = int(differs[0]) if differs.size else None
    return Faithfulness(float(divergences.mean()), 1 - differs.size / len(whole), first)


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    exact -= exact.max()
    found: NDArray[np.float64] = exact - np.log(np.exp(exact).sum())
    return found


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean over prompts, from resampled prompts.

    Give differences prompt by prompt to compare two caches. ValueError for no values.
    """
    sample = np.asarray(values, np.float64)
    if not sample.size:
        raise ValueError("values: expected at least one, found none")
    drawn = np.random.default_rng(seed).integers(0, sample.size, (RESAMPLES, sample.size))
    low, high = np.quantile(sample[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
