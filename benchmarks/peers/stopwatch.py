"""The times of one answer, alike for every engine."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """The arrival times of one batch's tokens."""

    first_token_seconds: float
    """Time from the call to the first token: prefill, and compaction where there is one."""
    token_seconds: list[float]
    """Time of every further token: one decode step for the whole batch."""


class Stopwatch:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def token(self) -> None:
        """Call when a token is there."""
        self._marks.append(time.perf_counter())

    def answer(self) -> Answer:
        """Return the times between the marks."""
        gaps = [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]
        return Answer(gaps[0], gaps[1:])
