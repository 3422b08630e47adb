"""Penalties on tokens that the text has already: they change one row's logits before anything is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvc_trt.runtime.request import Sampling


class Penalties:
    """The repetition, presence and frequency penalty of one row.

    The repetition penalty counts a token that was read anywhere (prompt, turns, answers) once: a positive logit is
    divided by it, a negative one multiplied (transformers, vLLM). Presence and frequency penalty are OpenAI's: of the
    tokens of the answer alone, the first is subtracted once, the second once per occurrence.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._repeats = sampling.repetition_penalty != 1.0
        self._counts_answer = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._read: set[int] = set()
        self._answered: Counter[int] = Counter()

    @property
    def is_active(self) -> bool:
        """True if any of the three changes logits."""
        return self._repeats or self._counts_answer

    def read(self, token_ids: Iterable[int]) -> None:
        """Take note of tokens that the text has now."""
        if self._repeats:
            self._read.update(token_ids)

    def answered(self, token_id: int) -> None:
        """Take note of a token of the answer."""
        if self._counts_answer:
            self._answered[token_id] += 1

    def begin_answer(self) -> None:
        """Forget the tokens of the answer before."""
        self._answered.clear()

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change `logits` [vocab] in place."""
        if self._read:
            ids = np.fromiter(self._read, np.int64, len(self._read))
            found = logits[ids]
            penalty = self._sampling.repetition_penalty
            logits[ids] = np.where(found < 0, found * penalty, found / penalty)
        if self._answered:
            ids = np.fromiter(self._answered.keys(), np.int64, len(self._answered))
            counts = np.fromiter(self._answered.values(), np.float32, len(self._answered))
            logits[ids] -= self._sampling.frequency_penalty * counts + self._sampling.presence_penalty
