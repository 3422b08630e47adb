"""Every node of a recorded run counts once, with the time that no node inside it takes."""

from __future__ import annotations

import json

import pytest

from kvc_trt.backends.onnxruntime.operator_times import BETWEEN, operator_times
from kvc_trt.errors import UnsupportedEnvironment


def node(name, operator, start, duration):
    return {"cat": "Node", "name": name, "ts": start, "dur": duration, "args": {"op_name": operator}}


def recorded(tmp_path, *events):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(events))
    return {one.name: one for one in operator_times(path)}


def run(start, duration):
    return {"cat": "Session", "name": "model_run", "ts": start, "dur": duration}


def test_nodes_inside_others_are_not_counted_twice(tmp_path):
    found = recorded(
        tmp_path,
        run(0, 50),
        run(100, 100),
        node("/first_kernel_time", "MatMul", 0, 50),
        node("/q_kernel_time", "MatMul", 105, 10),
        node("/loop_kernel_time", "Loop", 120, 60),
        node("_inlfunc_KvcDenseAttention_softmax_kernel_time", "Softmax", 125, 20),
        node("_inlfunc_KvcDenseAttention_product_kernel_time", "MatMul", 150, 25),
        node("/o_kernel_time", "MatMul", 185, 5),
    )
    microseconds = {name: one.seconds * 1e6 for name, one in found.items()}
    assert microseconds == pytest.approx({"MatMul": 15, "Loop": 15, "KvcDenseAttention": 45, BETWEEN: 25})
    assert found["MatMul"].calls == 2
    assert list(found) == ["KvcDenseAttention", BETWEEN, "MatMul", "Loop"]


def test_runs_after_the_first_are_averaged(tmp_path):
    events = [run(start, 10) for start in (0, 100, 200)]
    events += [node("/a", "Add", start, duration) for start, duration in ((0, 9), (100, 2), (200, 4))]
    assert recorded(tmp_path, *events)["Add"].seconds == pytest.approx(3e-6)


def test_a_profile_cut_short_by_a_full_disk_is_reported_as_such(tmp_path):
    recorded(tmp_path, run(0, 50), node("/a", "Add", 0, 9))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UnsupportedEnvironment, match="no space left"):
        operator_times(path)
