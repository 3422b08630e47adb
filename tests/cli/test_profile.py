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


def test_tables_findings_and_honest_labels(tiny_engine, capfd):
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
def test_mistakes_are_told_before_anything_is_measured(tiny_engine, arguments, expected, capfd):
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
