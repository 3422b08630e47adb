"""Penalties on tokens that one row's text already contains; they change the logits before a token is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy

import numpy as np
from numpy.typing import NDArray

from kvc_trt.runtime.request import Sampling
from kvc_trt.runtime.sampling.token_bits import TokenBits, Words


class Penalties:
    """The repetition, presence and frequency penalty of one row.

    The repetition penalty applies once to each token that occurs anywhere in the text (prompt, turns, answers): a
    positive logit is divided by it, a negative one multiplied (transformers, vLLM). Presence and frequency penalty are
    OpenAI's and apply to tokens of the answer alone: the first is subtracted once, the second once per occurrence.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._repeats = sampling.repetition_penalty != 1.0
        self._counts_answer = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._read = TokenBits()
        self._answered: Counter[int] = Counter()

    @property
    def is_active(self) -> bool:
        """True if any of the three penalties is set."""
        return self._repeats or self._counts_answer

    def read(self, token_ids: Iterable[int]) -> None:
        """Record tokens that were added to the text."""
        if self._repeats:
            self._read.add(token_ids)

    def answered(self, token_id: int) -> None:
        """Record a token of the answer."""
        if self._counts_answer:
            self._answered[token_id] += 1

    def begin_answer(self) -> None:
        """Begin another answer: forget the tokens of the previous one."""
        self._answered.clear()

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Apply the penalties to `logits` [vocab] in place."""
        if self._read:
            ids = self._read.ids()
            found = logits[ids]
            penalty = self._sampling.repetition_penalty
            logits[ids] = np.where(found < 0, found * penalty, found / penalty)
        if self._answered:
            ids, subtracted = self.subtracted()
            logits[ids] -= subtracted

    def subtracted(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the ids [n] of the answer's tokens, and the sum [n] of presence and frequency penalty of each."""
        ids = np.fromiter(self._answered.keys(), np.int64, len(self._answered))
        counts = np.fromiter(self._answered.values(), np.float32, len(self._answered))
        return ids, self._sampling.frequency_penalty * counts + self._sampling.presence_penalty

    def read_words(self, count: int) -> Words | None:
        """Return the set of tokens that the repetition penalty changes, as `count` words; None if there are none."""
        return self._read.words(count) if self._read else None

    def copy(self) -> Penalties:
        """Return an independent copy of the current state."""
        other = copy(self)
        other._read, other._answered = self._read.copy(), self._answered.copy()
        return other
