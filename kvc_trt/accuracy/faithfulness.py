"""Measure how closely a compressed cache follows the whole one, for questions without a known answer.

Both caches are fed the same tokens, one per step, and their distributions of the next token are compared. This needs no
labels: it measures the change by compression, not whether the model was right without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from kvc_trt.accuracy.questions import Question
    from kvc_trt.accuracy.under_test.answerer import Answerer
    from kvc_trt.models.config import ModelConfig

RESAMPLES = 10_000
"""Draws of a bootstrap interval."""
_DRAWN_TOGETHER = 1 << 20
"""Numbers of a bootstrap that are in memory at a time."""
LOGITS_BYTES = 256 << 20
"""Most bytes of the whole cache's logits that are kept while other caches are compared with them."""


@dataclass(frozen=True)
class Faithfulness:
    """One prompt's comparison with the whole cache."""

    divergence: float
    """Mean KL(whole || compressed), in nats per token."""
    equal: float
    """Share of the tokens for which both find the same one most likely."""
    first_difference: int | None
    """The first token for which they do not; None if there is none."""


WHOLE = Faithfulness(0.0, 1.0, None)
"""The whole cache, compared with itself."""


@dataclass(frozen=True)
class WholeCache:
    """The whole cache's greedy answers to some questions, and its logits along them."""

    questions: Sequence[Question]
    """With the answers as their targets."""
    logits: Sequence[NDArray[np.float32]]
    """[N,vocab] for an answer of N tokens, the first of which comes from the prompt's last token."""
    first: int
    """The first question's place in its set."""
    row_bytes: int
    """Bytes of the whole cache of one sequence."""

    @classmethod
    def of(cls, answerer: Answerer, questions: Sequence[Question], max_new_tokens: int, first: int) -> WholeCache:
        """Ask the whole cache twice: for the answers, and along them."""
        answers = answerer.answer(questions, max_new_tokens)
        followed = [replace(one, target_ids=answer) for one, answer in zip(questions, answers, strict=True)]
        return cls(followed, answerer.along_targets(followed), first, answerer.row_bytes)

    @staticmethod
    def questions_for(model: ModelConfig, new_tokens: int) -> int:
        """Return the number of questions that can be followed together, by the memory for their logits."""
        return max(1, LOGITS_BYTES // (4 * model.vocab_size * new_tokens))

    def followed_by(self, answerer: Answerer, first: int, last: int) -> list[Faithfulness]:
        """Compare a cache along the answers to the questions first .. last - 1 of the set."""
        some = slice(first - self.first, last - self.first)
        found = answerer.along_targets(self.questions[some])
        return [compare(whole, other) for whole, other in zip(self.logits[some], found, strict=True)]


def compare(whole: NDArray[np.float32], compressed: NDArray[np.float32]) -> Faithfulness:
    """Compare the logits [N,vocab] of N tokens, in float64.

    ValueError for other shapes; InputError for logits that are not finite, which are no distribution.
    """
    if whole.shape != compressed.shape or whole.ndim != 2 or not len(whole):
        raise ValueError(f"expected logits [N,vocab] of the same tokens, found {whole.shape} and {compressed.shape}")
    divergences = np.empty(len(whole))
    for place, (one, other) in enumerate(zip(whole, compressed, strict=True)):
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            raise InputError(f"the engine's logits are not finite at token {place} of an answer")
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
    random, together = np.random.default_rng(seed), max(1, _DRAWN_TOGETHER // sample.size)
    means = [
        sample[random.integers(0, sample.size, (min(together, RESAMPLES - done), sample.size))].mean(axis=1)
        for done in range(0, RESAMPLES, together)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)
