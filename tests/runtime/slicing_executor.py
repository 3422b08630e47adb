"""A fake executor that counts its slices, and a clock that only tests move."""

from __future__ import annotations

import numpy as np

from tests.runtime.fake_executor import FakeExecutor


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeSlicingExecutor(FakeExecutor):
    """Reads four tokens of a prompt per slice. `order` says what ran: "slice" or "step".

    A prompt with the token `BROKEN` fails in its second slice; one that ends with `NOT_A_NUMBER` gets NaN logits.
    """

    BROKEN, NOT_A_NUMBER = 48, 49
    TOKENS_PER_SLICE = 4

    def __init__(self, clock=None, **options):
        super().__init__(**options)
        self.order = []
        self.prepared = self.open_prefills = 0
        self.clock = clock

    def prepare_slices(self):
        self.prepared += 1

    def prefill_in_slices(self, input_ids, prompt_lengths, limit):
        self.open_prefills += 1
        try:
            slices = -(-int(prompt_lengths[0]) // self.TOKENS_PER_SLICE)
            for number in range(slices):
                if number:
                    yield number / slices
                self._ran("slice")
                if number and self.BROKEN in input_ids[0]:
                    raise RuntimeError("the second slice fails")
            prefilled = self.prefill(input_ids, prompt_lengths)
            if input_ids[0, prompt_lengths[0] - 1] == self.NOT_A_NUMBER:
                prefilled.logits[0, 3] = np.nan
            return prefilled
        finally:
            self.open_prefills -= 1

    def decode(self, tokens, positions, cache_lengths):
        self._ran("step")
        return super().decode(tokens, positions, cache_lengths)

    def _ran(self, what):
        self.order.append(what)
        if self.clock is not None:
            self.clock.now += 1
