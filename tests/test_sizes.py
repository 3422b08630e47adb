from __future__ import annotations

import pytest

from kvc_trt.sizes import readable_size


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
def test_the_largest_unit_that_leaves_at_least_one(count, text):
    assert readable_size(count) == text
