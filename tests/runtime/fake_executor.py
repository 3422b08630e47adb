"""An executor without a model: logits are a hash of every token a row has stored, so a lost or foreign row shows."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np

from kvc_trt.runtime.context import Fingerprint
from kvc_trt.runtime.executor import NOT_FINITE, Extended, Limits, Prefilled

EMPTY = -1


class FakeExecutor:
    """An executor with two caches: one keeps the last `budget` prompt tokens, one keeps everything."""

    def __init__(self, *, vocab_size=50, max_input_len=40, max_output_len=10, budget=12, prompt_block=8):
        total = max_input_len + max_output_len
        self.limits = Limits(
            vocab_size, max_input_len, max_output_len, total, (budget + max_output_len, total), prompt_block
        )
        self.budget = budget
        self.runs = 0
        self.prefills = 0
        self.batch_sizes = []
        self.poisoned = set()
        self.coarse = False
        """True makes many logits tie."""

    def load(self):
        """There is nothing to load."""

    def allocate(self, max_batch_size):
        self.answers = np.empty((max_batch_size, self.limits.vocab_size), np.float32)
        self.buffers = [np.full((max_batch_size, c), EMPTY, np.int64) for c in self.limits.capacities]

    def state_bytes(self):
        return sum(buffer.nbytes for buffer in self.buffers)

    def prefill(self, input_ids, prompt_lengths):
        assert input_ids.dtype == np.int64
        assert input_ids.shape[1] % self.limits.prompt_block == 0
        self.prefills += 1
        rows = len(prompt_lengths)
        state = [np.full((rows, c), EMPTY, np.int64) for c in self.limits.capacities]
        lengths = np.zeros((2, rows), np.int64)
        for row, length in enumerate(prompt_lengths):
            prompt = input_ids[row, :length]
            for cache, kept in enumerate((prompt[-self.budget :], prompt)):
                state[cache][row, : len(kept)] = kept
                lengths[cache, row] = len(kept)
        logits = [self._logits([buffer[row] for buffer in state], int(n)) for row, n in enumerate(prompt_lengths)]
        return Prefilled(np.stack(logits), lengths, state)

    def insert(self, prefilled, source_row, row):
        for buffer, source in zip(self.buffers, prefilled.state, strict=True):
            buffer[row] = source[source_row]

    def move(self, source_row, row):
        for buffer in self.buffers:
            buffer[row] = buffer[source_row]
            buffer[source_row] = EMPTY

    def read_row(self, row):
        return {f"cache.{cache}": buffer[row] for cache, buffer in enumerate(self.buffers)}

    def write_row(self, row, tensors):
        for name, array in tensors:
            self.buffers[int(name.removeprefix("cache."))][row] = array

    def decode(self, tokens, positions, cache_lengths):
        self.runs += 1
        self.batch_sizes.append(len(tokens))
        logits = []
        for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            for cache, buffer in enumerate(self.buffers):
                length = cache_lengths[cache, row]
                assert buffer[row, length] == EMPTY, "the slot of the new token must be empty"
                assert length == 0 or buffer[row, length - 1] != EMPTY, "no hole before the new token"
                buffer[row, length] = token
            logits.append(self._logits([buffer[row] for buffer in self.buffers], int(position) + 1))
        self.answers[: len(logits)] = np.stack(logits)
        return self.answers[: len(logits)]  # valid until the next call, as the protocol says

    def _logits(self, stored, position):
        digest = zlib.crc32(b"".join(part.tobytes() for part in stored) + str(position).encode())
        logits = np.random.default_rng(digest).standard_normal(self.limits.vocab_size).astype(np.float32)
        if self.coarse:
            logits = np.round(logits)
        if position in self.poisoned:
            logits[3] = np.nan
        return logits


class FakeTurnExecutor(FakeExecutor):
    """One that takes turns: the first cache keeps the last `budget` of stored and new tokens, the other one appends."""

    def __init__(self, **options):
        super().__init__(**options)
        self.limits = replace(self.limits, keeping=(False, True))
        self.turns = []
        self.turns_loaded = 0

    def load_turns(self):
        self.turns_loaded += 1

    def extend(self, first_row, input_ids, lengths, positions, cache_lengths):
        assert len(lengths) == input_ids.shape[0] == 1
        new = input_ids[0, : lengths[0]]
        self.turns.append((first_row, new.tolist(), int(positions[0])))
        after = []
        for cache, buffer in enumerate(self.buffers):
            row = buffer[first_row]
            both = np.concatenate([row[: cache_lengths[cache, 0]], new])
            kept = both[-self.budget :] if cache == 0 else both
            row[:] = EMPTY
            row[: len(kept)] = kept
            after.append(len(kept))
        logits = self._logits([buffer[first_row] for buffer in self.buffers], int(positions[0] + lengths[0]))
        every = None
        if self.limits.all_logits:  # which rank each new token first, and after the last one are its own
            every = np.eye(self.limits.vocab_size, dtype=np.float32)[input_ids]
            every[0, lengths[0] - 1] = logits
        return Extended(logits[None], np.array(after)[:, None], every)


class FakePacking:
    """Contexts of a `FakeExecutor`: the tokens that its two caches hold."""

    fingerprint = Fingerprint(*(f"{number}" * 64 for number in range(5)), "fake", "fake")

    def __init__(self, executor):
        self._executor = executor

    reads_everything = True
    other_turns = None

    @property
    def keeps_every_token(self):
        return self._executor.budget >= self._executor.limits.max_input_len

    def pack(self, row, cache_lengths, logical_length):
        return {name: row[name][:length].copy() for name, length in zip(row, cache_lengths, strict=True)}

    def nbytes(self, cache_lengths, logical_length):
        return 8 * sum(cache_lengths) + 4 * self._executor.limits.vocab_size

    def unpack(self, context):
        for (name, stored), slots in zip(context.tensors.items(), self._executor.limits.capacities, strict=True):
            yield name, np.pad(stored, (0, slots - len(stored)), constant_values=EMPTY)


class FakeGreedyExecutor(FakeExecutor):
    """One that also finds the best tokens itself; `asked` tells which of its two ways each run took."""

    def __init__(self, **options):
        super().__init__(**options)
        self.asked = []

    def decode(self, tokens, positions, cache_lengths):
        self.asked.append("logits")
        return super().decode(tokens, positions, cache_lengths)

    def decode_greedy(self, tokens, positions, cache_lengths):
        self.asked.append("best")
        logits = super().decode(tokens, positions, cache_lengths)
        return np.where(np.isfinite(logits.max(-1)), logits.argmax(-1), NOT_FINITE)
