"""Set the number of PyTorch threads for the reference: as many as make it faster now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

_ROWS, _INNER, _OUTER = 128, 1536, 576
_REPEATS = 8


@contextlib.contextmanager
def torch_threads(most: int | None = None) -> Iterator[None]:
    """Let PyTorch use `most` threads (None: as many as before) inside of the block, or one where that is faster.

    Threads wait for each other at the end of every operation, of which a decoder has thousands. Where other processes
    take a core, each wait lasts until the thread there gets its turn: with two threads the reference of a model of 135
    million parameters then took 3.6 to 7 times as long as with one. So the same operations are timed with both first,
    for some 50 ms.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(_faster(most or before))
        yield
    finally:
        torch.set_num_threads(before)


def _faster(most: int) -> int:
    return 1 if most == 1 else min((most, 1), key=_trial_seconds)


def _trial_seconds(threads: int) -> float:
    """Return the time of some operations like those of a decoder's layer."""
    torch.set_num_threads(threads)
    values, matrix = torch.ones(_ROWS, _INNER), torch.ones(_OUTER, _INNER)
    started = 0.0
    for repeat in range(_REPEATS + 1):
        if repeat == 1:  # the first one starts the threads
            started = time.perf_counter()
        values = torch.softmax(values.pow(2), -1)
        torch.nn.functional.linear(values, matrix).abs().max()
    return time.perf_counter() - started
