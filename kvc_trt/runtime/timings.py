"""The time that a session's prefills, steps and turns took."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc_trt.runtime.executor import Prefilled


@dataclass
class Timings:
    """Wall-clock seconds spent in the executor, and the tokens processed in that time."""

    prefill_seconds: float = 0.0
    prompt_tokens: int = 0
    decode_seconds: float = 0.0
    decode_runs: int = 0
    decode_tokens: int = 0
    draft_runs: int = 0
    """The number of decode runs that checked drafts."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """The number of drafted tokens that were accepted, and so fed; `decode_tokens` includes them."""
    turn_seconds: float = 0.0
    turn_tokens: int = 0

    def decode_tokens_per_second(self) -> float | None:
        """Return the tokens fed through decode per second, over all rows; None before the first step."""
        return self.decode_tokens / self.decode_seconds if self.decode_runs else None

    def of_slices(self, slices: Generator[float, None, Prefilled]) -> Generator[float, None, Prefilled]:
        """Run a prefill slice by slice, and add its time without the pauses between the slices."""
        while True:
            start = time.perf_counter()
            try:
                share = next(slices)
            except StopIteration as finished:
                prefilled: Prefilled = finished.value
                return prefilled
            finally:
                self.prefill_seconds += time.perf_counter() - start
            yield share
