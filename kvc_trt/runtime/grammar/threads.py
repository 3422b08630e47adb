"""Threads that compute masks while a model's step runs; they survive a fork of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class MaskThreads:
    """A pool of threads, started by the first mask. The library that computes masks lets other threads run meanwhile.

    A fork does not copy threads. So it waits until no mask is being computed, which takes less than one step, and the
    child gets a new pool: both processes have every mask computed before, and neither waits for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()
        os.register_at_fork(before=self._rest, after_in_parent=self._lock.release, after_in_child=self._begin_anew)

    def submit(self, compute: Callable[[], bytes]) -> Future[bytes]:
        """Start `compute` on a thread of the pool, and return its future mask."""
        with self._lock:
            coming = self._pool.submit(compute)
            self._running.add(coming)
        coming.add_done_callback(self._running.discard)
        return coming

    def _begin(self) -> None:
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "kvc-trt grammar mask")
        self._running: set[Future[bytes]] = set()

    def _rest(self) -> None:
        self._lock.acquire()
        wait(self._running.copy())

    def _begin_anew(self) -> None:
        self._begin()
        self._lock.release()
