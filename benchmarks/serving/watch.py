"""A server's memory while it is under load, and how many rows it answers at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import psutil

from benchmarks.serving.processes import Started

SECONDS = 1.0
_MOST_SAMPLES = 120


class Watch:
    """Looks every second from `__enter__` to `__exit__`. `running` returns the rows that are answered now."""

    def __init__(self, started: Sequence[Started], running: Callable[[], float]) -> None:
        self._started, self._running = started, running
        self._samples: list[tuple[float, float]] = []
        self._rows: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._end.set()
        self._thread.join()

    def figures(self) -> dict[str, Any]:
        """Return memory over time, in seconds and MiB, its growth, and the rows."""
        return memory_figures(self._samples) | {
            "rows_at_once": max(self._rows, default=0.0),
            "rows_median": median(self._rows) if self._rows else 0.0,
        }

    def _look(self) -> None:
        began = time.monotonic()
        while not self._end.is_set():
            at = time.monotonic() - began
            self._samples.append((at, sum(map(_resident, self._started)) / 2**20))
            with contextlib.suppress(OSError, ValueError):
                self._rows.append(self._running())
            self._end.wait(SECONDS)


def memory_figures(samples: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return samples of (seconds, MiB), thinned out, with the medians of their second and last fifth, and the peak.

    The first fifth is left out: threads and buffers that every load needs are still being made there.
    """
    if not samples:
        return {"memory": []}
    fifth = max(1, len(samples) // 5)
    sizes = [size for _, size in samples]
    every = -(-len(samples) // _MOST_SAMPLES)
    return {
        "memory": [(round(at, 1), round(size, 1)) for at, size in samples[::every]],
        "memory_early_mib": median(sizes[fifth : 2 * fifth] or sizes),
        "memory_late_mib": median(sizes[-fifth:]),
        "memory_peak_mib": max(sizes),
    }


def _resident(started: Started) -> int:
    """Return the resident bytes of a process and all below it; shared memory counts for each."""
    total = 0
    for process in started.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
