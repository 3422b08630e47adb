"""Figures as Prometheus text."""

from __future__ import annotations

from kvc_trt.runtime.scheduler.metrics import Metrics
from kvc_trt.serving.exposition import exposition, merged


def figures():
    metrics = Metrics(submitted=3)
    metrics.ended.update(["stop", "stop", "cancelled"])
    for seconds in (0.01, 0.3, 900.0):
        metrics.seconds_waiting.observe(seconds)
    return {"running": 2} | metrics.as_dict()


def test_counters_gauges_and_histograms_are_written_with_labels():
    lines = exposition(figures(), {"model": 'a"b'}).splitlines()
    assert 'kvc_trt_running{model="a\\"b"} 2' in lines
    assert 'kvc_trt_submitted_total{model="a\\"b"} 3' in lines
    assert 'kvc_trt_ended_total{model="a\\"b",kind="stop"} 2' in lines
    assert 'kvc_trt_seconds_waiting_bucket{model="a\\"b",le="0.05"} 1' in lines
    assert 'kvc_trt_seconds_waiting_bucket{model="a\\"b",le="+Inf"} 3' in lines
    assert 'kvc_trt_seconds_waiting_count{model="a\\"b"} 3' in lines
    assert lines.count("# TYPE kvc_trt_running gauge") == 1
    assert lines.count("# TYPE kvc_trt_ended_total counter") == 1


def test_texts_of_several_workers_describe_each_metric_once():
    texts = [exposition(figures(), {"model": name}) for name in ("a", "b")]
    lines = merged(["# HELP dynamo_requests all\n# TYPE dynamo_requests counter\ndynamo_requests 5\n", *texts])
    described = [line for line in lines.splitlines() if line.startswith("# TYPE")]
    assert len(described) == len(set(described))
    assert set(lines.splitlines()) >= {line for text in texts for line in text.splitlines()}
    running = [number for number, line in enumerate(lines.splitlines()) if line.startswith("kvc_trt_running")]
    assert running[1] == running[0] + 1
