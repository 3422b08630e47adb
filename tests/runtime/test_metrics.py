"""Figures of a scheduler: the histograms, and the events that each figure counts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.scheduler.metrics import LONG_TIMES, SHORT_TIMES, Histogram, Metrics
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from tests.runtime.fake_executor import FakePacking
from tests.runtime.scheduling import finish, scheduler
from tests.runtime.slicing_executor import FakeSlicingExecutor


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


def test_metrics_count_what_happened():
    one = scheduler(rows=1)
    one.submit(Request([1] * 20, max_new_tokens=3))
    finish(one)
    found = one.metrics()
    assert (found["submitted"], found["prompt_tokens"], found["generated_tokens"]) == (1, 20, 3)
    # One of two caches keeps 12 of the 20 prompt tokens, the other all.
    assert (found["kept_tokens"], found["evicted_tokens"]) == (32, 8)
    assert found["seconds_waiting"]["sum"] == 0
    assert found["seconds_to_first_token"]["sum"] == 5  # of the fake clock: five slices
    assert (found["seconds_per_token"]["count"], found["seconds_per_token"]["sum"]) == (2, 2)
    assert found["stall_seconds"]["count"] == 0


def test_metrics_count_a_shared_prefix_once():
    executor = FakeSlicingExecutor(budget=40)
    one = Scheduler(Session(executor, None, 1, packing=FakePacking(executor), prefix_bytes=1 << 20))
    for prompt in ([1] * 20, [*[1] * 20, 2, 3]):
        one.submit(Request(prompt, max_new_tokens=1))
        finish(one)
    found = one.metrics()
    assert (found["prompt_tokens"], found["kept_tokens"], found["evicted_tokens"]) == (22, 40, 0)


def test_metrics_of_a_policy_that_keeps_the_whole_cache_count_no_eviction():
    executor = FakeSlicingExecutor()
    executor.limits = replace(executor.limits, keeps_whole=True)
    one = scheduler(executor=executor)
    one.submit(Request([1] * 20, max_new_tokens=1))
    finish(one)
    assert (one.metrics()["kept_tokens"], one.metrics()["evicted_tokens"]) == (40, 0)


def test_stalls_are_slices_that_rows_waited_for():
    one = scheduler(rows=2)
    one.submit(Request([1], max_new_tokens=10))
    one.advance()
    one.submit(Request([2] * 8, max_new_tokens=1))
    finish(one)
    stalls = one.metrics()["stall_seconds"]
    assert (stalls["count"], stalls["sum"], stalls["largest"]) == (2, 2.0, 1.0)
