"""Measurements of a host's memory and its bandwidth: their conditions, not their speed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvc_trt.backends.benchmark import CopyBandwidth
from kvc_trt.backends.host_memory import last_level_cache_bytes, measure_copy_bandwidth, watch_memory
from kvc_trt.machine import peak_resident_bytes


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_bandwidth_measurement_records_its_conditions(threads):
    found = measure_copy_bandwidth(threads, repeats=3, buffer_bytes=(1 << 20) + 1)
    assert (found.samples, found.threads, found.buffer_bytes) == (3, threads, (1 << 20) + 1)
    assert found.median > 0
    assert found.spread >= 0
    assert found.last_level_cache_bytes == last_level_cache_bytes()


@pytest.mark.parametrize(("cache", "beyond"), [(None, True), (500, True), (1000, False)])
def test_a_buffer_within_the_cache_is_reported(cache, beyond):
    assert CopyBandwidth(1e9, 1e8, 3, 500, 1, cache).beyond_cache is beyond


def test_watch_memory_sees_a_short_peak():
    size = 96 << 20
    with watch_memory() as peak:
        block = np.ones(size, np.uint8)
        deadline = time.monotonic() + 30
        while peak.above < size and time.monotonic() < deadline:
            time.sleep(0.001)  # the sampler needs a turn while the block is there
        del block
    assert 0.9 * size < peak.above < 2 * size
    assert peak_resident_bytes() > 0.9 * peak.highest  # the kernel counts the two lazily, each in its own way
