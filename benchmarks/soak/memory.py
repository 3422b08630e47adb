"""The memory of processes over time: one sample every few seconds, and the slope of a line through the minutes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import psutil

SECONDS = 5.0
_MINUTE = 60.0
_OF_95_PERCENT = 1.96


class MemoryWatch(threading.Thread):
    """Looks at all processes that `processes` returns, by role, until it has to end."""

    def __init__(self, processes: Callable[[], Mapping[str, psutil.Process]]) -> None:
        super().__init__(daemon=True)
        self._processes = processes
        self._began = time.monotonic()
        self._samples: dict[str, list[tuple[float, int, float]]] = defaultdict(list)
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.is_set():
            for role, process in self._processes().items():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    size = process.memory_info().rss / 2**20
                    self._samples[role].append((time.monotonic() - self._began, process.pid, size))
            self.ending.wait(SECONDS)

    def figures(self, since: float) -> dict[str, Any]:
        """Return the growth of each process that lived from `since`, seconds after the beginning, until now."""
        found = {}
        for role, samples in self._samples.items():
            last = samples[-1][1]
            minutes = by_minute([(at, size) for at, pid, size in samples if pid == last and at >= since])
            if len(minutes) > 2:
                found[role] = growth(minutes)
        return found


def by_minute(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the median of each minute's samples of (seconds, MiB)."""
    minutes: dict[int, list[float]] = defaultdict(list)
    for at, size in samples:
        minutes[int(at // _MINUTE)].append(size)
    return [(minute * _MINUTE, median(sizes)) for minute, sizes in sorted(minutes.items())]


def growth(minutes: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the least-squares slope in MiB per hour with its 95 % interval, and the points that it was fitted to."""
    hours = [at / 3600 for at, _ in minutes]
    sizes = [size for _, size in minutes]
    middle, mean = fmean(hours), fmean(sizes)
    spread = sum((hour - middle) ** 2 for hour in hours)
    slope = sum((hour - middle) * (size - mean) for hour, size in zip(hours, sizes, strict=True)) / spread
    left = [size - mean - slope * (hour - middle) for hour, size in zip(hours, sizes, strict=True)]
    error = math.sqrt(sum(one**2 for one in left) / max(1, len(minutes) - 2) / spread)
    return {
        "mib_per_hour": slope,
        "low": slope - _OF_95_PERCENT * error,
        "high": slope + _OF_95_PERCENT * error,
        "minutes": len(minutes),
        "first_mib": sizes[0],
        "last_mib": sizes[-1],
        "peak_mib": max(sizes),
        "mib_by_minute": [round(size, 1) for size in sizes],
    }
