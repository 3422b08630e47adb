from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.runtime.metrics import LONG_TIMES, SHORT_TIMES, Histogram, Metrics


@given(st.lists(st.floats(0, 400)), st.sampled_from([SHORT_TIMES, LONG_TIMES]))
def test_a_bucket_counts_what_is_up_to_its_bound(values, bounds):
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    found = histogram.as_dict()
    assert found["buckets"] == {bound: sum(value <= bound for value in values) for bound in bounds}
    assert (found["count"], found["largest"]) == (len(values), max(values, default=0.0))
    assert found["sum"] == sum(values)


def test_every_figure_is_exported_as_a_plain_value():
    metrics = Metrics()
    metrics.ended["stop"] += 2
    metrics.stall_seconds.observe(0.03)
    found = metrics.as_dict()
    assert found.keys() == vars(metrics).keys()
    assert found["ended"] == {"stop": 2}
    assert found["stall_seconds"]["buckets"][0.05] == 1
