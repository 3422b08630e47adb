"""An executor without a model that checks drafts, and whose answers repeat themselves as a text does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvc_trt.runtime.executor import CheckedDraft
from tests.runtime.fake_executor import EMPTY, FakeExecutor, FakeTurnExecutor

DRAFT_TOKENS = 4


class FakeDraftExecutor(FakeTurnExecutor):
    """After position p comes token (p + first token) % `period`, except at the positions `breaks`.

    `decode` refuses a slot that is not empty: what was not taken back shows.
    """

    def __init__(self, *, period=7, breaks=(), draft_tokens=DRAFT_TOKENS, **options):
        super().__init__(**options)
        self.period, self.breaks = period, frozenset(breaks)
        self.limits = replace(self.limits, draft_tokens=draft_tokens)
        self.passes = 0
        self.loaded = False

    def load_drafts(self):
        self.loaded = True

    def check_draft(self, tokens, positions, cache_lengths):
        assert self.loaded
        assert tokens.shape == (1 + self.limits.draft_tokens, len(positions))
        steps = [
            FakeExecutor.decode(self, of_rows, positions + number, cache_lengths + number).copy()
            for number, of_rows in enumerate(tokens)
        ]
        self.passes += 1
        self.runs -= len(steps) - 1
        return CheckedDraft(np.stack(steps), [("undo", int(position)) for position in positions])

    def take_back(self, row, undo, cache_lengths, kept):
        assert undo[0] == "undo"
        assert 1 <= kept <= self.limits.draft_tokens
        for buffer, stored in zip(self.buffers, cache_lengths, strict=True):
            first, end = int(stored) + kept, int(stored) + 1 + self.limits.draft_tokens
            assert (buffer[row, first:end] != EMPTY).all(), "there was nothing to take back"
            buffer[row, first:end] = EMPTY

    def _logits(self, stored, position):
        logits = super()._logits(stored, position)
        if position not in self.breaks:
            logits[(position + int(stored[1][0])) % self.period] += 20
        return logits
