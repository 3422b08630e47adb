from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.profile.statistics import percentile, summarise

SAMPLES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60)


@given(SAMPLES, st.floats(0, 100))
def test_percentiles_are_numpys(samples, percent):
    assert percentile(samples, percent) == pytest.approx(float(np.percentile(samples, percent)), rel=1e-9)


@given(SAMPLES)
def test_a_summary_agrees_with_the_statistics_module(samples):
    summary = summarise(samples)
    assert summary.samples == len(samples)
    assert summary.mean == pytest.approx(statistics.fmean(samples))
    assert summary.median == summary.p50 == pytest.approx(statistics.median(samples))
    assert summary.minimum <= summary.p50 <= summary.p90 <= summary.p99 <= summary.maximum
    assert summary.std == pytest.approx(statistics.stdev(samples) if len(samples) > 1 else 0, abs=1e-9, rel=1e-6)


def test_fields_are_named_by_statistic_and_unit():
    fields = summarise([0.001, 0.003]).milliseconds("itl")
    assert list(fields) == [f"{kind}_itl_ms" for kind in ("mean", "median", "std", "p50", "p90", "p99")]
    assert fields["median_itl_ms"] == pytest.approx(2.0)
    assert summarise([2.0, 2.0]).noise_percent == 0


def test_empty_samples_and_wrong_percentiles_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        summarise([])
    with pytest.raises(ValueError, match="found 101"):
        percentile([1.0], 101)
