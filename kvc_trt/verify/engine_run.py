"""One batch through an executor: prefill, then one token per row and step, with a look at every operator if wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import VerificationFailed
from kvc_trt.verify.prompts import Batch

if TYPE_CHECKING:
    from kvc_trt.runtime.executor import Executor

Observer = Callable[[int, NDArray[np.int64]], None]
"""Called with the step's number and the stored lengths [caches,B] after its append."""


@dataclass
class EngineRun:
    """Logits of a batch, and the tokens that were fed."""

    logits: NDArray[np.float32]
    """[N+1,B,vocab]: after the prompt, and after each of N steps."""
    tokens: NDArray[np.int64]
    """[N,B]: token fed at each step."""
    cache_lengths: NDArray[np.int64]
    """[caches,B] after prefill."""


def run(
    executor: Executor,
    batch: Batch,
    steps: int,
    *,
    tokens: NDArray[np.int64] | None = None,
    after_prefill: Callable[[Any], None] | None = None,
    after_step: Observer | None = None,
) -> EngineRun:
    """Feed `tokens` [N,B], or greedily what the engine itself says where they are None.

    VerificationFailed where prefill claims caches that cannot be: nothing after it could be judged.
    """
    rows = len(batch)
    executor.allocate(rows)
    prefilled = executor.prefill(batch.input_ids, batch.prompt_lengths)
    _check_lengths(prefilled.cache_lengths, executor.limits.capacities)
    if after_prefill is not None:
        after_prefill(prefilled)
    for row in range(rows):
        executor.insert(prefilled, row, row)
    logits = np.empty((steps + 1, rows, executor.limits.vocab_size), np.float32)
    fed = np.empty((steps, rows), np.int64)
    logits[0] = prefilled.logits
    lengths = prefilled.cache_lengths.copy()
    for step in range(steps):
        fed[step] = logits[step].argmax(-1) if tokens is None else tokens[step]
        logits[step + 1] = executor.decode(fed[step], batch.prompt_lengths + step, lengths)
        lengths += 1
        if after_step is not None:
            after_step(step, lengths)
    return EngineRun(logits, fed, prefilled.cache_lengths)


def _check_lengths(cache_lengths: NDArray[np.int64], capacities: tuple[int, ...]) -> None:
    for cache, (lengths, slots) in enumerate(zip(cache_lengths, capacities, strict=True)):
        if lengths.min() < 0 or lengths.max() > slots:
            raise VerificationFailed(f"cache {cache} of {slots} slots holds {lengths.tolist()} tokens after prefill")
