"""Three prompts of different lengths, and an executor that has read them: the start of tests of every executor."""

from __future__ import annotations

import numpy as np

LENGTHS = (200, 1, 31)


def padded(prompts):
    length = -(-max(map(len, prompts)) // 128) * 128
    ids = np.zeros((len(prompts), length), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    return ids, np.array([len(prompt) for prompt in prompts], np.int64)


def prompts(lengths=LENGTHS):
    random = np.random.default_rng(0)
    return [random.integers(2, 97, length).tolist() for length in lengths]


def filled(executor, rows=3):
    """Prefill the prompts into the first rows; returns the arguments of the next decode."""
    ids, lengths = padded(prompts(LENGTHS[:rows]))
    prefilled = executor.prefill(ids, lengths)
    for row in range(rows):
        executor.insert(prefilled, row, row)
    return prefilled.logits.argmax(axis=1), lengths.copy(), prefilled.cache_lengths.copy()
