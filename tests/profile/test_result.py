"""The result of a whole profile: its fields, its files, and its list of left-out figures."""

from __future__ import annotations

import csv
import io
import json
import struct

import pytest

from kvc_trt.backends.benchmark import CopyBandwidth
from kvc_trt.backends.onnxruntime import benchmark
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.files.atomic import write_whole
from kvc_trt.profile import run as profile_run
from kvc_trt.profile import sweep as profile_sweep
from kvc_trt.profile.pages.files import csv_bytes, png_bytes
from kvc_trt.profile.request import ProfileRequest, check_contexts, default_contexts
from kvc_trt.progress import NullProgress

REQUEST = ProfileRequest(
    contexts=(96, 512),
    batches=(1, 2),
    steps=5,
    decode_seconds=5.0,
    prefills=1,
    prefill_seconds=60.0,
    options=RunOptions(threads=1),
)
SECTIONS = ("engine", "machine", "request_info", "performance", "streaming_metrics", "memory", "floor", "findings")


@pytest.fixture
def bandwidth(monkeypatch):
    """Ten GB/s, without copying gigabytes."""
    found = CopyBandwidth(10e9, 1e8, 3, 1 << 30, 1, 1 << 20)
    monkeypatch.setattr(benchmark, "measure_copy_bandwidth", lambda threads: found)


@pytest.fixture
def result(engine, bandwidth):
    return profile_run.profile_engine(engine, REQUEST, NullProgress())


def test_a_result_has_every_section_and_is_plain_json(result, tmp_path):
    assert set(SECTIONS) <= set(result)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    keys = [(row["context"], row["batch_size"], row["side"]) for row in result["rows"]]
    assert keys == [(c, b, side) for c in (96, 512) for b in (1, 2) for side in ("engine", "dense")]
    for row in result["rows"]:
        assert row["samples"] == 10
        assert row["min_itl_ms"] <= row["p50_itl_ms"] <= row["p90_itl_ms"] <= row["p99_itl_ms"]
        assert row["floor_ms"] == pytest.approx(row["bytes_read_per_step_modelled"] / 10e9 * 1e3)
        assert row["percent_of_floor"] == pytest.approx(100 * row["floor_ms"] / row["median_itl_ms"])
        assert row["median_ttft_ms"] == pytest.approx(row["prefill_ms"] + row["compaction_ms"])
    engine, dense = result["rows"][-2:]
    assert engine["speedup_over_dense"] == pytest.approx(dense["median_itl_ms"] / engine["median_itl_ms"])
    assert engine["cache_bytes_read_per_step_modelled"] < dense["cache_bytes_read_per_step_modelled"]
    assert engine["prefill_minus_dense_ms"] == pytest.approx(engine["median_ttft_ms"] - dense["median_ttft_ms"])
    assert engine["compaction_ms"] > 0 == dense["compaction_ms"]
    _check_sections(result)
    _check_files(result, tmp_path)


def _check_sections(result):
    assert result["request_info"]["decode_cache"] == "filled synthetically"
    assert result["machine"]["threads"] == 1
    streaming = result["streaming_metrics"][0]
    for kind in ("mean", "median", "std", "p50", "p90", "p99"):
        assert {f"{kind}_ttft_ms", f"{kind}_tpot_ms", f"{kind}_itl_ms"} <= set(streaming)
    assert {"system_output_throughput_tok_s", "output_throughput_per_user_tok_s"} <= set(result["performance"][0])
    assert {"noise_percent", "samples"} <= set(result["performance"][0])
    assert {line["kind"] for line in result["memory"]["rows"]} == {"weights", "cache", "page bounds", "prefill"}
    assert result["floor"]["copy_bandwidth"]["median_gb_s"] == 10
    _check_decode_memory(result)


def _check_decode_memory(result):
    decode = result["memory"]["decode"]
    for row, peak in zip(result["rows"], decode, strict=True):
        where = {name: row[name] for name in ("context", "batch_size", "side")}
        assert where.items() <= peak.items()
        lines = [line for line in result["memory"]["rows"] if where.items() <= line.items()]
        of_kind = {line["kind"]: line for line in lines}
        state = [of_kind[kind] for kind in ("cache", "page bounds") if kind in of_kind]
        assert peak["state_modelled_bytes"] == sum(line["modelled_bytes"] for line in state)
        assert peak["state_allocated_bytes"] == sum(line["measured_bytes"] for line in state)
        assert peak["peak_with_weights_bytes"] == of_kind["weights"]["measured_bytes"] + peak["peak_bytes"]
    engine, dense = decode[-2:]
    assert engine["state_modelled_share_of_dense"] == engine["state_modelled_bytes"] / dense["state_modelled_bytes"] < 1
    assert dense["peak_share_of_dense"] in (1, None)  # None: too small to be seen


def _check_files(result, directory):
    rows = list(csv.DictReader(io.StringIO(csv_bytes(result["rows"]).decode())))
    assert len(rows) == len(result["rows"])
    assert float(rows[0]["median_itl_ms"]) == result["rows"][0]["median_itl_ms"]
    path = directory / "deep" / "profile.png"
    write_whole(path, png_bytes(result))
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", header[16:24])) >= 400
    assert list(path.parent.iterdir()) == [path]


def test_a_prefill_that_would_take_too_long_is_left_out_and_said(engine, bandwidth, monkeypatch):
    monkeypatch.setattr(
        profile_sweep._Sweeper, "_expected_prefill", lambda _, subject, context, batch: 1.0 if context < 100 else 61.0
    )
    request = ProfileRequest((64, 512), (1,), 3, 5.0, 1, prefill_seconds=60.0, options=RunOptions(threads=1))
    result = profile_run.profile_engine(engine, request, NullProgress())
    by_context = {row["context"]: row for row in result["rows"] if row["side"] == "engine"}
    assert by_context[64]["median_ttft_ms"] is not None
    assert by_context[512]["median_ttft_ms"] is None
    assert by_context[512]["median_itl_ms"] > 0
    assert any("a prefill would take about 61 s" in sentence for sentence in result["findings"])
    json.dumps(result, allow_nan=False)
    csv_bytes(result["rows"])


def test_a_limit_of_zero_measures_no_prefill(engine, bandwidth):
    request = ProfileRequest((64,), (1,), 3, 5.0, 1, prefill_seconds=0.0, options=RunOptions(threads=1))
    result = profile_run.profile_engine(engine, request, NullProgress())
    assert {row["median_ttft_ms"] for row in result["rows"]} == {None}


def test_a_twin_that_does_not_fit_is_left_out_and_said(engine, bandwidth, monkeypatch):
    monkeypatch.setattr(profile_sweep, "_fits", lambda subject, rows: subject.name == "engine")
    request = ProfileRequest((128,), (1,), 3, 5.0, 1, 60.0, RunOptions(threads=1))
    result = profile_run.profile_engine(engine, request, NullProgress())
    (row,) = result["rows"]
    assert row["side"] == "engine"
    assert row["speedup_over_dense"] is None
    assert result["left_out"] == ["context 128, batch 1: the dense caches do not fit this machine's memory"]
    assert png_bytes(result)[:4] == b"\x89PNG"


def test_default_contexts_are_halves_of_the_longest(engine):
    assert default_contexts(engine.parameters) == (128, 256, 512)


@pytest.mark.parametrize("context", [0, 513])
def test_contexts_beyond_the_engine_are_refused(engine, context):
    assert check_contexts((512, 1, 512), engine.parameters, engine.model) == (1, 512)
    with pytest.raises(InputError, match="1 to 512 tokens"):
        check_contexts((64, context), engine.parameters, engine.model)


def test_no_longer_engine_is_advised_than_the_model_allows(engine):
    positions = engine.model.max_position_embeddings
    for context, hint in ((positions, f"build it with --max-input-len {positions}"), (positions + 1, None)):
        with pytest.raises(InputError) as caught:
            check_contexts((context,), engine.parameters, engine.model)
        assert caught.value.hint == hint


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "profile.csv"
    write_whole(path, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(UnsupportedEnvironment, match="no space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
