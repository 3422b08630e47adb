"""A prefill that waits between slices, so that rows that are being answered take a step meanwhile.

A prefill is made of pieces: in each layer, blocks of tokens of the projections, blocks of queries of attention, one
compaction, and blocks of tokens of the feed-forward network; in a linear layer, blocks of tokens of all of it. A
prefill without slices runs the same pieces, so the result is the same bit for bit. Nothing is computed twice, and a
tensor that lives between two pieces lives in a whole prefill too. A compaction sees all queries, keys and values of its
layer, whatever the policy.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_slices(
    pieces: Generator[None, None, Result], counts: Sequence[int], limit: float
) -> Generator[float, None, Result]:
    """Run pieces, `counts` of each layer; yield the share that has run, 0..1, wherever a slice ends.

    A slice ends when the next piece would take it past `limit` seconds. A piece is expected to take as long as the same
    one of the last layer of its kind, which has as many pieces; in the first of a kind, as long as the longest so far.
    """
    took: list[float] = []
    alike = _alike(counts)
    began = time.perf_counter()
    try:
        while True:
            start = time.perf_counter()
            try:
                next(pieces)
            except StopIteration as end:
                result: Result = end.value
                return result
            now = time.perf_counter()
            took.append(now - start)
            if now - began + _expected(took, alike) > limit:
                yield len(took) / len(alike)
                began = time.perf_counter()
    finally:
        pieces.close()


def _expected(took: Sequence[float], alike: Sequence[int | None]) -> float:
    """Return how long the piece after those that `took` so long is expected to take; 0 after the last."""
    if len(took) >= len(alike):
        return 0.0
    like = alike[len(took)]
    return max(took) if like is None else took[like]


def _alike(counts: Sequence[int]) -> list[int | None]:
    """Return for each piece the number of the same one in the layer before with as many; None if there is none."""
    found: list[int | None] = []
    starts: dict[int, int] = {}
    for count in counts:
        first = starts.get(count)
        starts[count] = len(found)
        found += [None if first is None else first + piece for piece in range(count)]
    return found


def each_done(pieces: Generator[None, None, Result], device: torch.device) -> Generator[None, None, Result]:
    """Run pieces and wait after each until the device has computed it."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield
