"""Threads that compute masks while a model's step runs, also in a process that forked after they began."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class MaskThreads:
    """A pool of threads that are begun with the first mask. The masks' library lets other threads run meanwhile.

    A fork copies none of the threads. So it waits until no mask is being computed, which takes less than one step, and
    the child gets a pool of its own: what was computed before is in both processes, and neither waits for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()
        os.register_at_fork(before=self._rest, after_in_parent=self._lock.release, after_in_child=self._begin_anew)

    def submit(self, compute: Callable[[], bytes]) -> Future[bytes]:
        """Begin to compute a mask."""
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
