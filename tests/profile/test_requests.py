"""Many requests at once: the load, the rows of both sides, the figures, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.backends.run_options import RunOptions
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.profile.requests import run as requests_run
from kvc_trt.profile.requests.client import Answered, Run, ask_all
from kvc_trt.profile.requests.figures import KINDS, figures, over_repeats
from kvc_trt.profile.requests.lengths import Lengths
from kvc_trt.profile.requests.load import Asking, Load, LoadRequest, asking
from kvc_trt.profile.requests.run import profile_requests
from kvc_trt.profile.requests.sides import sides_of
from kvc_trt.progress import NullProgress
from kvc_trt.runtime.scheduler.scheduler import Scheduler

SMALL = Load(
    4, concurrency=2, input_len=Lengths.parse("40:90"), output_len=Lengths.parse("2:5"), warmup=1, repeats=2
)  # fmt: skip
OPTIONS = RunOptions(threads=1)


@given(
    st.one_of(
        st.integers(1, 500).map(str),
        st.tuples(st.integers(1, 500), st.integers(0, 100)).map(lambda ends: f"{ends[0]}:{sum(ends)}"),
        st.tuples(st.integers(1, 600), st.floats(0, 2000, allow_nan=False)).map(
            lambda it: f"normal:{it[0]},{it[1]:.3f}"
        ),
    ),
    st.integers(0, 1 << 32),
)
def test_lengths_stay_within_their_bounds_and_follow_the_seed(text, seed):
    lengths = Lengths.parse(text)
    drawn = lengths.draw(np.random.default_rng(seed), 50, 600)
    assert drawn == lengths.draw(np.random.default_rng(seed), 50, 600)
    low, high = (1, 600) if lengths.mean is not None else (lengths.low, lengths.high)
    assert all(low <= length <= high for length in drawn)


def test_a_normal_distribution_has_its_mean_and_deviation():
    drawn = Lengths.parse("normal:300,40").draw(np.random.default_rng(0), 4000, 600)
    assert np.mean(drawn) == pytest.approx(300, abs=3)
    assert np.std(drawn) == pytest.approx(40, abs=2)
    assert set(Lengths.parse("normal:300,0").draw(np.random.default_rng(0), 9, 600)) == {300}


@pytest.mark.parametrize("text", ["", "0", "5:3", "0:4", "-1", "1:2:3", "normal:9", "normal:9,-1", "1e3", "nan", True])
def test_malformed_length_distributions_are_refused(text):
    with pytest.raises(InputError, match=r"expected"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"rows": 1.5}, "rows is 1.5"),
        ({"repeats": True}, "repeats is True"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"request_rate": 0.0}, "request_rate is 0.0"),
        ({"data": "own.jsonl"}, "input_len and data"),
    ],
)
def test_invalid_settings_are_refused_by_name(changes, expected):
    with pytest.raises(InputError, match=expected):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("changes", "expected", "hint"),
    [
        ({"input_len": Lengths.parse(513)}, "input_len 513: this engine takes 1 to 512", "--max-input-len 513"),
        ({"output_len": Lengths.parse("1:33")}, "output_len 1:33: this engine takes 1 to 32", "--max-output-len 33"),
        ({"input_len": Lengths.parse("normal:700,5")}, "input_len normal:700,5", "--max-input-len 700"),
    ],
)
def test_lengths_beyond_the_engine_are_refused(engine, changes, expected, hint):
    with pytest.raises(InputError, match=expected) as caught:
        asking(dataclasses.replace(SMALL, **changes), engine)
    assert hint in caught.value.hint


def test_equal_seeds_ask_the_same_and_arrive_at_the_rate(engine):
    load = dataclasses.replace(SMALL, requests=20, request_rate=4.0, seed=3)
    first, second = asking(load, engine), asking(load, engine)
    assert [list(one.prompt()) for one in first.requests] == [list(one.prompt()) for one in second.requests]
    assert [len(one.prompt()) for one in first.requests] == [one.input_len for one in first.requests]
    assert first.arrivals == second.arrivals == tuple(sorted(first.arrivals))
    assert first.arrivals[-1] == pytest.approx(20 / 4.0)
    other = asking(dataclasses.replace(load, seed=4), engine)
    assert [one.input_len for one in other.requests] != [one.input_len for one in first.requests]
    longest = asking(Load(2), engine)
    assert longest.longest == (512, 32)
    assert longest.arrivals == (0.0, 0.0)


def _asked(*lengths):
    requests = tuple(LoadRequest(lambda: (), prompt, answer) for prompt, answer in lengths)
    return Asking(requests, (0.0,) * len(requests), "")


def test_the_twin_has_the_rows_that_fit_into_the_engines_bytes(engine):
    asked = _asked((500, 12), (244, 12))
    own, twin = sides_of(engine, asked, 8, 100)
    token = sum(tensor.bytes_per_row() for tensor in twin.program.state) / 512
    assert twin.program.parameters.max_sequence_len == 512
    assert twin.row_bytes == pytest.approx(token * asked.mean_tokens)
    assert twin.cache_bytes <= own.cache_bytes < twin.cache_bytes + twin.row_bytes
    assert sides_of(engine, asked, 8, 3)[1].rows == 3
    assert sides_of(engine, asked, 1, 100)[1].rows == 1


def test_figures_follow_from_known_times():
    answered = (Answered(10, 1.0, (1.5, 1.7, 2.1)), Answered(20, 2.0, (2.2,)))
    found = figures(Run(4.0, answered))
    assert found["request_throughput"] == 0.5
    assert found["input_throughput"] == 7.5
    assert found["output_throughput"] == 1.0
    assert found["total_token_throughput"] == 8.5
    assert found["mean_ttft_ms"] == pytest.approx(350)
    assert found["mean_tpot_ms"] == pytest.approx(300)
    assert found["p50_itl_ms"] == pytest.approx(300)
    assert found["mean_e2el_ms"] == pytest.approx((1100 + 200) / 2)
    single = figures(Run(1.0, answered[1:]))
    assert single["mean_tpot_ms"] is None
    assert single["p99_itl_ms"] is None
    both = over_repeats([found, figures(Run(2.0, answered))])
    assert both["request_throughput"] == 0.75
    assert both["spread"]["request_throughput"] == [0.5, 1.0]
    assert both["completed"] == 2
    assert over_repeats([single])["spread"]["mean_tpot_ms"] is None


def test_a_measurement_has_every_run_and_is_plain_json(engine):
    result = profile_requests(engine, SMALL, NullProgress(), OPTIONS)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert [(run["side"], run["repeat"]) for run in result["runs"]] == [
        ("engine", 0), ("dense", 0), ("dense", 1), ("engine", 1),
    ]  # fmt: skip
    asked = asking(SMALL, engine)
    for row in result["rows"]:
        assert row["completed"] == 4
        assert row["total_input_tokens"] == sum(one.input_len for one in asked.requests)
        assert row["total_output_tokens"] == sum(one.output_len for one in asked.requests)
        assert 0 < row["p50_ttft_ms"] <= row["p90_ttft_ms"] <= row["p99_ttft_ms"]
        low, high = row["spread"]["request_throughput"]
        assert low <= row["request_throughput"] <= high
        for kind in KINDS:
            assert row[f"mean_{kind}_ms"] > 0
    assert result["machine"]["threads"] == 1
    assert result["request_info"]["request_rate"] == "inf"
    assert "as many requests per second as its dense twin" in result["findings"][0]


def test_a_twin_that_does_not_fit_is_given_a_row_and_said(engine, monkeypatch):
    monkeypatch.setattr(requests_run, "open_scheduler", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(requests_run, "_runs", lambda sides, *_: [
        {"side": side.name, "repeat": 0, **figures(Run(1.0, (Answered(5, 0.0, (1.0,)),)))} for side in sides
    ])  # fmt: skip
    small = dataclasses.replace(SMALL, input_len=None, concurrency=1, repeats=1)
    findings = profile_requests(engine, small, NullProgress(), OPTIONS)["findings"]
    assert any("not the same memory: one dense row takes" in sentence for sentence in findings)
    wide = profile_requests(engine, dataclasses.replace(small, concurrency=2, rows=9), NullProgress(), OPTIONS)
    assert any("the twin has a row for every concurrent request" in sentence for sentence in wide["findings"])


def test_caches_beyond_the_memory_are_refused_before_anything_runs(engine, monkeypatch):
    """This holds on any machine: the memory is the test's own."""
    check = requests_run.check_fits
    monkeypatch.setattr(requests_run, "check_fits", lambda sides, _: check(sides, free_bytes=1 << 20))
    monkeypatch.setattr(requests_run, "open_scheduler", lambda *_: pytest.fail("an engine was opened"))
    with pytest.raises(UnsupportedEnvironment, match=r"rows of the engine and .* of its dense twin take") as caught:
        profile_requests(engine, dataclasses.replace(SMALL, rows=100), NullProgress(), OPTIONS)
    assert "--rows" in caught.value.hint


def test_a_failing_request_ends_the_measurement_and_its_threads(engine, monkeypatch):
    closed = []
    close = Scheduler.close
    monkeypatch.setattr(Scheduler, "close", lambda self, **given: (closed.append(given), close(self, **given)))

    def fail(*_):
        raise InputError("no such prompt")

    monkeypatch.setattr(Scheduler, "submit", fail)
    with pytest.raises(InputError, match="no such prompt"):
        profile_requests(engine, SMALL, NullProgress(), OPTIONS)
    assert closed == [{"drain": False}] * 2


def test_requests_can_be_profiled_inside_a_running_event_loop():
    async def in_a_notebook():
        return ask_all(None, Asking((), (), ""), 1, None)

    assert asyncio.run(in_a_notebook()).answered == ()
