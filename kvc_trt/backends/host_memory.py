"""This machine's main memory: its copy bandwidth, the yardstick of a decode step, and the memory a run needs.

One buffer is copied to another, each as large as the last-level cache or larger, by as many threads as the engine uses:
streaming through both defeats the cache. Every byte counts twice, once read and once written (as in STREAM). Reading
alone can be a little faster, so the floor is not an exact bound, but it is the same yardstick on every machine.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from kvc_trt.backends.benchmark import LARGEST_SHARE_OF_MEMORY, CopyBandwidth, Peak

LEAST_BUFFER, LARGEST_BUFFER = 256 << 20, 1 << 30
SAMPLING_SECONDS = 0.002
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def measure_copy_bandwidth(threads: int, *, repeats: int = 9, buffer_bytes: int | None = None) -> CopyBandwidth:
    """Time `repeats` copies of one buffer (default: as large as the last-level cache, memory permitting)."""
    cache = last_level_cache_bytes()
    size = buffer_bytes or _buffer_size(cache)
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)
    cuts = [size * part // threads for part in range(threads + 1)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:
        rates = _rates(pool, source, target, spans, repeats)
    return CopyBandwidth.of(rates, size, threads, cache)


def last_level_cache_bytes() -> int | None:
    """Return the size of the largest CPU cache in bytes; None if unknown."""
    sizes = []
    for entry in _CACHES.glob("index*/size"):
        text = entry.read_text(encoding="ascii", errors="replace").strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
        elif text.endswith("M") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 20)
    return max(sizes, default=None)


def _buffer_size(cache: int | None) -> int:
    import psutil

    wanted = min(max(LEAST_BUFFER, cache or 0), LARGEST_BUFFER)
    both = psutil.virtual_memory().available * LARGEST_SHARE_OF_MEMORY
    return int(min(wanted, both / 2))


def _rates(
    pool: ThreadPoolExecutor, source: np.ndarray, target: np.ndarray, spans: list[slice], repeats: int
) -> list[float]:
    def copy(span: slice) -> None:
        np.copyto(target[span], source[span])

    list(pool.map(copy, spans))  # touches every page and starts every thread
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        list(pool.map(copy, spans))
        rates.append(2 * source.size / (time.perf_counter() - started))
    return rates


@contextmanager
def watch_memory(*, mapped: bool = True) -> Iterator[Peak]:
    """Sample the process's resident memory every two milliseconds while the block runs.

    Without `mapped`, pages of files do not count if the system reports them separately (Linux): mapped weights become
    resident when a step first reads them.
    """
    import psutil

    process = psutil.Process()

    def resident() -> int:
        found = process.memory_info()
        return int(found.rss if mapped else found.rss - getattr(found, "shared", 0))

    _return_free_memory()
    peak = Peak(resident())
    if not mapped:
        peak.how = "resident memory above rest without mapped files, sampled every 2 ms"
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLING_SECONDS):
            peak.highest = max(peak.highest, resident())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()
        peak.highest = max(peak.highest, resident())


def _return_free_memory() -> None:
    """Return the allocator's free memory to the system, so that it does not hide the memory that the next work
    needs."""
    with suppress(OSError, AttributeError):  # no glibc: the figure is then a lower bound
        ctypes.CDLL("libc.so.6").malloc_trim(0)
