"""The load tests of servers: the tools' inputs and outputs, the figures, the page; and a bounded run of each server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import store
from benchmarks.serving import aiperf, measure, openai_server, page, perf_analyzer, plots, triton_server
from benchmarks.serving.check_answers import Answered, figures, quantile
from benchmarks.serving.engines import Expected
from benchmarks.serving.load import Asked
from benchmarks.serving.place import Place
from benchmarks.serving.points import POINTS, selected
from benchmarks.serving.watch import memory_figures

ROOT = Path(__file__).resolve().parents[3]
ASKED = [Asked((1, 2, 3), 3), Asked((1, 5), 2)]
EXPECTED = [
    Expected("red big dog", ("red", "red big", "red big dog"), (0.5, 0.0005, 0.5)),
    Expected("a b", ("a", "a b"), (1.0, 1.0)),
]


def test_perf_analyzer_reads_shapes_without_a_batch_and_writes_nanoseconds():
    first = perf_analyzer.input_data(ASKED)["data"][0]
    assert first["input_ids"] == {"content": [1, 2, 3], "shape": [3]}
    assert first["max_tokens"] == [3]
    request = {
        "timestamp": 1_000_000_000,
        "request_inputs": {"input_ids": [1, 5], "max_tokens": 2},
        "response_timestamps": [1_500_000_000, 1_600_000_000],
        "response_outputs": [
            {"text_output": "a", "kv_cache_tokens_kept": -114130942},
            {"text_output": " b", "finish_reason": "length"},
        ],
    }
    nothing = {**request, "response_timestamps": [], "response_outputs": []}
    found, lost = perf_analyzer.read_export({"experiments": [{"requests": [request, nothing]}]}, ASKED)
    assert (found.place, found.text, found.tokens, found.error) == (1, "a b", 2, None)
    assert found.first_token_seconds == pytest.approx(0.5)
    assert found.seconds_per_token == pytest.approx(0.1)
    assert lost.error == "no response"


class NeverReady:
    """A server that was started and does not become ready."""

    started = ()
    ended = 0

    def __init__(self, *arguments, **options):
        pass

    def wait_ready(self):
        raise SystemExit("error: the server is not ready")

    def metric(self, name):
        return 0.0

    def end(self):
        type(self).ended += 1


@pytest.mark.parametrize("server", ["triton", "light", "dynamo", "apart"])
def test_a_server_that_does_not_become_ready_is_ended(server, monkeypatch, tmp_path):
    never = type("Never", (NeverReady,), {})
    monkeypatch.setattr(measure, "prepare", lambda kind, place: measure.Prepared(tmp_path, 0, ASKED, EXPECTED))
    monkeypatch.setattr(triton_server, "export", lambda *arguments: None)
    monkeypatch.setattr(triton_server, "TritonServer", never)
    monkeypatch.setattr(openai_server, "OpenAIServer", never)
    point = next(one for one in POINTS if one.server == server)
    place = Place(tmp_path, tmp_path, tmp_path, tmp_path, None)
    with pytest.raises(SystemExit, match="not ready"):
        measure.measure(point, place, clients=1, seconds=1)
    assert never.ended == 1


def event(at, **fields):
    return {"perf_ns": at, "packets": [{"name": "data", "value": json.dumps(fields)}]}


def record(place, *responses, error=None, phase="profiling"):
    metadata = {"conversation_id": str(place), "benchmark_phase": phase}
    done = {"perf_ns": 9_000_000_000, "packets": [{"name": "data", "value": "[DONE]"}]}
    return {"metadata": metadata, "start_perf_ns": 1_000_000_000, "responses": [*responses, done], "error": error}


def choice(text, reason=None):
    return [{"text": text, "index": 0, "finish_reason": reason}]


def test_aiperf_sends_requests_as_they_are_and_writes_every_event():
    sent = aiperf.input_data(ASKED, "m")["data"][1]
    assert sent["session_id"] == "1"
    assert sent["payloads"][0]["prompt"] == [1, 5]
    whole = record(
        1,
        event(1_500_000_000, choices=choice("a")),
        event(1_700_000_000, choices=[{**choice(" b", "length")[0], "kvc": {"moved_bytes": 7}}]),
        event(1_700_000_000, choices=[], usage={"completion_tokens": 2}),
    )
    cut = record(0, event(1_500_000_000, choices=choice("red")))
    broken = record(0, event(1_500_000_000, choices=choice("red")), event(1_600_000_000, error={"message": "no"}))
    refused = record(0, error={"code": 400, "message": "too long"})
    warm = record(0, phase="warmup")
    answered = aiperf.read_export([whole, cut, broken, refused, warm])
    assert answered[0].text == "a b"
    assert answered[0].tokens == 2
    assert answered[0].kvc == {"moved_bytes": 7}
    assert answered[0].seconds_per_token == pytest.approx(0.2)
    errors = [one.error for one in answered]
    assert errors[0] is None
    assert errors[1] == "the answer has no end"
    assert "no" in errors[2]
    assert "too long" in errors[3]
    assert len(answered) == 4


def answered(place, text, began=0.0, arrivals=(1.0, 2.0), error=None):
    return Answered(place, began, arrivals, text, 3, error)


def test_requests_without_an_answer_are_lost():
    of = [answered(0, " red big dog"), answered(1, "", arrivals=(), error="500"), answered(1, "a b", 1.0, (3.0, 5.0))]
    found = figures(4, of, EXPECTED)
    assert (found["answered"], found["lost"], found["errors"]) == (2, 2, ["500"])
    assert found["seconds"] == 5.0
    assert found["answer_tokens_per_second"] == pytest.approx(6 / 5)
    assert found["first_token_seconds"]["p50"] == 1.0
    assert found["first_token_seconds"]["p99"] == 2.0
    assert figures(1, [], EXPECTED)["lost"] == 1


def test_answers_may_leave_at_a_near_tie_alone():
    of = [answered(0, "red big dog"), answered(0, "red small dog"), answered(1, "a c"), answered(1, "b b")]
    assert figures(4, of, EXPECTED)["compared"] == {"equal": 1, "near_tie": 1, "different": 2}


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_a_value_that_enough_do_not_exceed(values, share):
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_memory_is_compared_without_its_beginning():
    samples = [(float(at), 50.0 if at < 20 else 100.0 if at < 80 else 110.0) for at in range(100)]
    found = memory_figures(samples)
    assert found["memory_early_mib"] == 100
    assert found["memory_late_mib"] == 110
    assert found["memory_peak_mib"] == 110
    assert memory_figures([]) == {"memory": []}


def test_points_are_selected_by_a_part_of_their_names():
    assert selected("") == list(POINTS)
    assert {point.server for point in selected("apart, triton")} == {"apart", "triton"}
    with pytest.raises(SystemExit, match="no point is named nonsense"):
        selected("nonsense")


def point(name):
    one = next(one for one in POINTS if one.name == name)
    spread = {"p50": 0.5, "p90": 0.6, "p99": 0.9, "max": 1.0}
    return {
        "sent": 40, "answered": 39, "lost": 1, "errors": ["503 busy"], "seconds": 60.0, "requests_per_second": 0.65,
        "answer_tokens_per_second": 31.0 if one.rows > 1 else 15.5, "first_token_seconds": spread,
        "seconds_per_token": spread, "gap_seconds": spread, "answer_seconds": spread,
        "compared": {"equal": 38, "near_tie": 1, "different": 0}, "kvc": {"kept_tokens_per_cache": 300.0},
        "memory": [(0.0, 500.0), (1.0, 510.0)], "memory_early_mib": 500.0, "memory_late_mib": 510.0,
        "memory_peak_mib": 520.0, "rows_at_once": 7.0, "rows_median": 6.0, "server": one.server, "kind": one.kind,
        "rows": one.rows, "memory_bytes": one.memory_bytes, "tool": one.tool, "clients": 32, "row_bytes": 8 << 20,
        "others_share": 0.2 if name == "apart-full" else 0.0,
    }  # fmt: skip


def result(names):
    versions = {"kvc_trt": "1", "onnxruntime": "2"}
    machine = {"commit": "abc", "device": "a processor", "usable_cores": 2, "time_utc": "2026-01-01T00:00:00Z"}
    points = {name: point(name) for name in names}
    return {
        "machine": {**machine, "versions": versions},
        "command": "run",
        "versions": {"aiperf": "0"},
        "points": points,
    }


def test_the_page_compares_what_was_measured():
    text = page.text(result([one.name for one in POINTS]), "images")
    assert "**2 processor cores**" in text
    assert "31.0 tokens/s in a batch, 15.5 one by one (2.00 times)" in text
    assert "may take 640 MiB" in text
    assert "| apart, full cache | - | 300 |" in text
    assert "| apart-full † | smollm2-full |" in text
    assert "- dynamo-tiny: 503 busy" in text
    assert "![memory](images/serving-memory.svg)" in text


def test_the_page_says_where_the_time_was_too_short():
    data = result(["triton-tiny", "triton-full"])
    data["points"]["triton-tiny"]["sent"] = 64
    assert "\ntriton-full: the time was too short" in page.text(data, "images")


def test_the_page_and_its_plots_are_those_of_the_results():
    data = store.recorded(page.NAME, "make bench-serving")
    assert page.PAGE.read_text(encoding="utf-8") == page.text(data, "../images", page.in_turns())
    for name, drawn in page.pictures(data["points"]).items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == drawn


def test_servers_that_took_turns_are_compared_by_the_median_round():
    def one_round(ratio):
        pair = {name: point(name) for name in ("light-tiny", "dynamo-tiny")}
        pair["light-tiny"]["answer_tokens_per_second"] *= ratio
        return pair

    data = result([one.name for one in POINTS])
    turns = {**data, "command": "in turns", "rounds": [one_round(ratio) for ratio in (0.5, 3.0, 1.25)]}
    text = page.text(data, "images", turns)
    assert "In turns, 3 rounds" in text
    assert "tiny, **1.25 times** Dynamo's tokens per second in the median, 0.50 to 3.00; 6 requests lost" in text


def test_a_page_of_few_points_compares_nothing():
    text = page.text(result(["triton-tiny"]), "images")
    assert "## Continuous batching" not in text
    assert "## Prefill and decode apart" not in text
    assert "†" not in text


def test_plots_are_whole_documents():
    drawn = plots.lines({"a & b": [(0.0, 1.0), (50.0, 990.0)]}, "s", "MiB", "memory <1>")
    texts = [one.text for one in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "0", "1,000", "50"} <= set(texts)
    many = plots.lines({str(place): [(0.0, 1.0), (1.0, 1.0)] for place in range(8)}, "s", "MiB", "memory")
    assert many.count("<path") - many.count("H620") == 16, "no line is left out"
    bars = ElementTree.fromstring(plots.bars({"one": 2.0, "two": 4.0}, "unit", "label"))
    first, second = [float(one.get("width")) for one in bars.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert second == pytest.approx(2 * first, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.dynamo
def test_triton_and_dynamo_are_loaded_by_their_tools(tmp_path):
    environments = {name: ROOT / "build" / name for name in ("triton", "dynamo", "aiperf")}
    for name, path in environments.items():
        if not (path / "bin" / "python").exists():
            pytest.skip(f"there is no {path}: make {name}-env")
    program = (
        "import sys; from pathlib import Path; from benchmarks import store;"
        "from benchmarks.serving import __main__, watch;"
        "store.UNCOMMITTED = Path(sys.argv.pop(1)); watch.SECONDS = 0.2; __main__.main()"
    )
    command = [sys.executable, "-c", program, str(tmp_path), "--quick", "--work", str(tmp_path / "work")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=280)
    assert done.returncode == 0
    assert "triton-tiny" in (tmp_path / "serving.md").read_text()
    found = json.loads((tmp_path / "serving-quick.json").read_text())["points"]
    assert set(found) == {"triton-tiny", "light-tiny", "dynamo-tiny"}
    for one in found.values():
        assert one["lost"] == 0, one["errors"]
        assert one["compared"]["different"] == 0
        assert one["memory_peak_mib"] > 10
    # A load of three seconds on busy cores may go by between two looks at one server.
    assert any(one["rows_at_once"] >= 1 for one in found.values())
