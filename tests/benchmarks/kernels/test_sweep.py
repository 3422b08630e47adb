"""Points of a sweep on a command line."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels.sweep import SweepPoint, count, point

COUNTS = st.integers(1, 1 << 20)


@given(st.sampled_from(["rocketkv", "quest-matched", "snapkv++"]), COUNTS, COUNTS, COUNTS)
def test_a_point_is_read_as_it_is_written(policy, batch, context, budget):
    written = SweepPoint(policy, batch, context, budget)
    assert point(str(written)) == written


@pytest.mark.parametrize("text", ["8/32768/512", "rocketkv/0/32768/512", "rocketkv/1/32768/x", "rocket/1/32768/512"])
def test_invalid_points_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        point(text)


def test_a_count_of_zero_is_refused():
    assert count("3") == 3
    with pytest.raises(argparse.ArgumentTypeError):
        count("0")
