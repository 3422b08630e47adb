from __future__ import annotations

import pytest

from kvc_trt.sizes import bandwidth_of, bytes_of, readable_count, readable_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-3 << 19, "-1.5 MiB"),
        (12 << 30, "12.0 GiB"),
        (5 << 42, "20.0 TiB"),
        (5 << 52, "20480.0 TiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_that_leaves_at_least_one(count, text):
    assert readable_size(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("60MiB", 60 << 20),
        ("1.5 GB", 1_500_000_000),
        ("2GiB", 2 << 30),
        (" 12 B ", 12),
        ("4096", 4096),
        ("60mib", 60 << 20),
        ("0.5TiB", 1 << 39),
    ],
)
def test_sizes_have_units(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["0", "0MiB", "-1GiB", "1e3MB", "MiB", "60 foo", "1GiB/s", "", "1.GiB"])
def test_malformed_sizes_are_none(text):
    assert bytes_of(text) is None


def test_counts_have_three_digits():
    assert [readable_count(one) for one in (0, 326, 527_040, 134_515_008, 8_030_261_248, 405e9)] == [
        "0", "326", "527K", "135M", "8.03B", "405B",
    ]  # fmt: skip


def test_a_bandwidth_is_a_size_by_the_second():
    assert (bandwidth_of("12.5GB/s"), bandwidth_of("100Gbit/s"), bandwidth_of("1GiB/s")) == (12.5e9, 12.5e9, None)
