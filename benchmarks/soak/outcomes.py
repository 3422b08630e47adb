"""The outcome of each request, counted by many threads, and the rule for accidents."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

EQUAL, DIFFERENT, REFUSED, BUSY, BROKEN, LOST, LEFT = (
    "equal", "different", "refused", "busy", "error while a process was down", "lost", "left",
)  # fmt: skip
"""Its answer is the quiet run's, or another; refused with a reason; found the queue full; ended with an error that says
so, and a process was killed meanwhile; no answer and no error; its client went away."""
UNEXPLAINED = "error without a cause"
MOST_EXAMPLES = 20
_SETTLES_SECONDS = 3.0
"""For so long after every engine answers again, a connection from before may still break."""


@dataclass
class Outcomes:
    """Counts by kind of request, and the first examples of forbidden outcomes."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    examples: list[dict[str, Any]] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)
    """Times on the monotonic clock: the end of a process, and the moment at which every engine answered again."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, outcome: str, what: object = None) -> None:
        """Count one request; keep the details of a forbidden one."""
        with self._lock:
            self.counts[kind][outcome] += 1
            if outcome in (DIFFERENT, LOST, UNEXPLAINED) and len(self.examples) < MOST_EXAMPLES:
                self.examples.append({"kind": kind, "outcome": outcome, "what": str(what)[:600]})

    def down(self) -> None:
        """Note that a process is about to be killed."""
        with self._lock:
            self.kills.append((time.monotonic(), float("inf")))

    def up(self) -> None:
        """Note that every engine answers again."""
        with self._lock:
            self.kills[-1] = (self.kills[-1][0], time.monotonic() + _SETTLES_SECONDS)

    def of_error(self, began: float) -> str:
        """Return the outcome for an error with this text, in a request that began then and ends now."""
        with self._lock:
            down = any(began <= until and since <= time.monotonic() for since, until in self.kills)
        return BROKEN if down else UNEXPLAINED

    def total(self, *outcomes: str) -> int:
        """Return how many requests had one of these outcomes."""
        with self._lock:
            return sum(counted[one] for counted in self.counts.values() for one in outcomes)
