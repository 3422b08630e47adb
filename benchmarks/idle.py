"""The share of the processor that other programs used during a measurement."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Indices into the first line of /proc/stat: user, nice, system, irq, softirq, steal."""


class Others:
    """Starts when it is made; `share()` returns the share used by everybody but this process and its ended children."""

    def __init__(self) -> None:
        self._cores = os.sysconf("SC_NPROCESSORS_ONLN")
        self._began = self._now()

    def share(self) -> float:
        """Return the share of all cores in 0..1 since the start."""
        began, ended = self._began, self._now()
        wall, busy, own = (after - before for before, after in zip(began, ended, strict=True))
        return min(1.0, max(0.0, busy - own) / (wall * self._cores))  # ticks are coarse on a short run

    @staticmethod
    def _now() -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        busy = sum(int(fields[place]) for place in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.perf_counter(), busy, sum(one.ru_utime + one.ru_stime for one in used)
