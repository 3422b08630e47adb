"""What is measured, not how fast it is."""

from __future__ import annotations

import pytest

from kvc_trt.profile.copy_bandwidth import CopyBandwidth, last_level_cache_bytes, measure_copy_bandwidth


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_measurement_carries_its_conditions(threads):
    found = measure_copy_bandwidth(threads, repeats=3, buffer_bytes=(1 << 20) + 1)
    assert (found.samples, found.threads, found.buffer_bytes) == (3, threads, (1 << 20) + 1)
    assert found.median > 0
    assert found.spread >= 0
    assert found.last_level_cache_bytes == last_level_cache_bytes()


@pytest.mark.parametrize(("cache", "beyond"), [(None, True), (500, True), (1000, False)])
def test_a_buffer_within_the_cache_is_told(cache, beyond):
    assert CopyBandwidth(1e9, 1e8, 3, 500, 1, cache).beyond_cache is beyond
