"""A prefill that waits between slices, so that rows that are being answered take a step meanwhile.

A prefill is made of pieces: in each layer, blocks of tokens of the projections, blocks of queries of attention, one
compaction, and blocks of tokens of the feed-forward network. A prefill without slices runs the same pieces, so the
result is the same bit for bit. Nothing is computed twice, and what lives between two pieces lives in a whole prefill
too. A compaction sees all queries, keys and values of its layer, whatever the policy.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_slices(
    pieces: Generator[None, None, Result], each: int, layers: int, limit: float
) -> Generator[float, None, Result]:
    """Run pieces, `each` of every layer; yield the share that has run, 0..1, wherever a slice ends.

    A slice ends when the next piece would take it past `limit` seconds. A piece is expected to take as long as the same
    one of the layer before; in the first layer, as long as the longest so far.
    """
    took: list[float] = []
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
            expected = took[-each] if len(took) >= each else max(took)
            if now - began + expected > limit:
                yield len(took) / (each * layers)
                began = time.perf_counter()
    finally:
        pieces.close()


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
