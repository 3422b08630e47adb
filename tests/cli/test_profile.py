"""`kvc-trt profile` as a user meets it."""

from __future__ import annotations

import csv
import json

import pytest

from kvc_trt.backends.benchmark import CopyBandwidth
from kvc_trt.backends.onnxruntime import benchmark
from kvc_trt.cli.main import run

QUICK = ["--contexts", "64,256", "--batch", "2", "--steps", "4", "--prefills", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def _bandwidth(monkeypatch):
    """Ten GB/s, without copying gigabytes."""
    found = CopyBandwidth(10e9, 1e8, 3, 1 << 30, 1, 1 << 20)
    monkeypatch.setattr(benchmark, "measure_copy_bandwidth", lambda threads: found)


def test_profile_prints_tables_findings_and_labels(tiny_engine, capfd):
    assert run(["profile", str(tiny_engine), *QUICK]) == 0
    captured = capfd.readouterr()
    headings = (
        "cache filled synthetically",
        "time to first token (measured",
        "memory at 256 tokens, batch 2",
        "findings",
    )
    assert all(heading in captured.out for heading in headings)
    assert "modelled" in captured.out
    assert "context 64, batch 2" in captured.err
    assert max(map(len, captured.out.splitlines())) <= 130


def test_json_is_alone_and_files_are_whole(tiny_engine, tmp_path, capfd):
    files = ["--csv", str(tmp_path / "rows.csv"), "--png", str(tmp_path / "plot.png"), "-o", str(tmp_path / "out")]
    assert run(["profile", str(tiny_engine), *QUICK, *files, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [row["context"] for row in result["rows"]] == [64, 64, 256, 256]
    assert json.loads((tmp_path / "out" / "profile.json").read_text()) == result
    written = ["profile.csv", "profile.json", "profile.png", "report.html"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == written
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [row["side"] for row in csv.DictReader(file)] == ["engine", "dense"] * 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--contexts", "257"], "prompts of 1 to 256 tokens"),
        (["--contexts", "0"], "not a list of positive numbers"),
        (["--contexts", "12,x"], "not a list of positive numbers"),
        (["--batch", "-1"], "not a list of positive numbers"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(tiny_engine, arguments, expected, capfd):
    assert run(["profile", str(tiny_engine), *arguments]) == 2
    captured = capfd.readouterr()
    assert expected in captured.err
    assert captured.out == ""


def test_a_damaged_engine_is_refused(tiny_engine, capfd):
    weights = tiny_engine / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run(["profile", str(tiny_engine), *QUICK]) == 2
    assert "weights.safetensors was changed" in capfd.readouterr().err


MANY = ["--requests", "3", "--concurrency", "2", "--input-len", "20:60", "--output-len", "3", "--threads", "1"]


def test_profile_of_many_requests_prints_and_writes_its_tables(tiny_engine, tmp_path, capfd):
    files = ["--csv", str(tmp_path / "runs.csv"), "-o", str(tmp_path / "out")]
    assert run(["profile", str(tiny_engine), *MANY, "--repeats", "2", *files]) == 0
    text = capfd.readouterr().out
    for expected in (
        "throughput (measured; medians of 2 runs",
        "first token",
        "per output token",
        "end to end",
        "findings",
    ):
        assert expected in text
    result = json.loads((tmp_path / "out" / "requests.json").read_text())
    assert [row["side"] for row in result["rows"]] == ["engine", "dense"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["requests.csv", "requests.json"]
    with (tmp_path / "runs.csv").open(newline="") as file:
        assert [line["side"] for line in csv.DictReader(file)] == ["engine", "dense", "dense", "engine"]


def test_profile_of_many_requests_takes_prompts_from_a_file(chat_engine, tmp_path, capfd):
    data = tmp_path / "own.jsonl"
    lines = [{"context": "a b c", "question": "d ?"}, {"messages": [{"role": "user", "content": "a b"}]}]
    data.write_text("\n".join(map(json.dumps, lines)))
    few = ["--requests", "3", "--data", str(data), "--output-len", "2", "--repeats", "1", "--warmup", "0"]
    assert run(["profile", str(chat_engine), *few, "--threads", "1", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["request_info"]["prompts"].startswith("own.jsonl, 2 lines, SHA-256 ")
    assert result["rows"][0]["total_output_tokens"] == 6
    data.write_text(json.dumps({"context": "a " * 400, "question": "b"}))
    assert run(["profile", str(chat_engine), *few]) == 2
    assert "own.jsonl line 1: a prompt of" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--concurrency", "2"], "--concurrency goes with --requests"),
        (["--requests", "0"], "'--requests': 0 is not in the range"),
        (["--requests", "2", "--steps", "3"], "--steps goes without --requests"),
        (["--requests", "2", "--png", "x.png"], "--png draws steps"),
        (["--requests", "2", "--input-len", "5:3"], "the smaller one first"),
        (["--requests", "2", "--input-len", "257"], "this engine takes 1 to 256 tokens"),
        (["--requests", "2", "--request-rate", "0"], "'--request-rate': 0.0 is not in the range"),
        (["--requests", "2", "--data", "none.jsonl"], "cannot read none.jsonl"),
        (["--requests", "2", "--data", "none.jsonl", "--input-len", "4"], "input_len and data"),
    ],
)
def test_invalid_request_options_are_refused_in_one_line(tiny_engine, arguments, expected, capfd):
    assert run(["profile", str(tiny_engine), *arguments]) == 2
    captured = capfd.readouterr()
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
