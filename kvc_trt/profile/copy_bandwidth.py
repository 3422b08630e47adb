"""The bandwidth that a decode step is judged against: how fast this machine copies memory, measured.

One buffer is copied to another, each as large as the last-level cache or larger, by as many threads as the engine uses:
streaming through both leaves nothing to find in the cache. Every byte counts twice, once read and once written (as
STREAM counts). Reading alone can be a little faster, so a floor from it is no bound to the
percent; it is the same yardstick on every machine.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvc_trt.profile.statistics import Summary, summarise

LEAST_BUFFER, LARGEST_BUFFER = 256 << 20, 1 << 30
LARGEST_SHARE_OF_MEMORY = 0.125
"""Both buffers together take at most a quarter of the free memory."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class CopyBandwidth:
    """Bytes per second, read and written together."""

    median: float
    spread: float
    """Standard deviation of the rates."""
    samples: int
    buffer_bytes: int
    threads: int
    last_level_cache_bytes: int | None

    @property
    def beyond_cache(self) -> bool:
        """Whether source and target together are at least twice the last-level cache, which then serves neither."""
        return self.last_level_cache_bytes is None or self.buffer_bytes >= self.last_level_cache_bytes


def measure_copy_bandwidth(threads: int, *, repeats: int = 9, buffer_bytes: int | None = None) -> CopyBandwidth:
    """Times `repeats` copies of one buffer (default: as large as the last-level cache, memory permitting)."""
    cache = last_level_cache_bytes()
    size = buffer_bytes or _buffer_size(cache)
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)
    cuts = [size * part // threads for part in range(threads + 1)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:
        rates = _rates(pool, source, target, spans, repeats)
    return CopyBandwidth(rates.median, rates.std, rates.samples, size, threads, cache)


def last_level_cache_bytes() -> int | None:
    """Size of the largest processor cache; None where the system does not tell."""
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
    return int(min(wanted, psutil.virtual_memory().available * LARGEST_SHARE_OF_MEMORY))


def _rates(
    pool: ThreadPoolExecutor, source: np.ndarray, target: np.ndarray, spans: list[slice], repeats: int
) -> Summary:
    def copy(span: slice) -> None:
        np.copyto(target[span], source[span])

    list(pool.map(copy, spans))  # touches every page and starts every thread
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        list(pool.map(copy, spans))
        rates.append(2 * source.size / (time.perf_counter() - started))
    return summarise(rates)
