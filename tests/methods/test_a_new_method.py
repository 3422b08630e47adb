"""A method of new kinds is one file: dropped into the package, every command knows it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import kvc_trt.methods
from kvc_trt import policies
from kvc_trt.cli.main import run

NAME = "every-third"
FILE = Path(__file__).parent / "throwaway.py"
LENGTHS = ["--token-budget", "32", "--max-input-len", "128", "--max-output-len", "16"]


@pytest.fixture
def dropped_in(tmp_path, monkeypatch):
    """The one file in a folder that the package looks into; nothing is registered."""
    folder = tmp_path / "methods"
    folder.mkdir()
    shutil.copy(FILE, folder / "every_third.py")
    monkeypatch.setattr(kvc_trt.methods, "__path__", [*kvc_trt.methods.__path__, str(folder)])
    yield folder / "every_third.py"
    sys.modules.pop("kvc_trt.methods.every_third", None)
    monkeypatch.delattr(kvc_trt.methods, "every_third", raising=False)


def test_it_is_unknown_without_its_file():
    assert NAME not in [one.name for one in policies.describe()]


def test_policies_and_plan_list_it(dropped_in, tiny_model, capsys):
    assert run(["policies", "--json"]) == 0
    (entry,) = [one for one in json.loads(capsys.readouterr().out)["policies"] if one["name"] == NAME]
    kinds = entry["prompt_eviction"], entry["decode_selection"]
    assert (kinds, entry["engines"]) == (("thirds", "newest"), ["onnxruntime", "openvino", "torch"])
    assert run(["plan", "--model", str(tiny_model), "--compare", *LENGTHS, "--json"]) == 0
    (row,) = [one for one in json.loads(capsys.readouterr().out)["policies"] if one["policy"] == NAME]
    assert 0 < row["read_share"] < row["stored_share"] < 1
    assert run(["plan", "--model", str(tiny_model), "--policy", NAME, *LENGTHS]) == 0


def test_an_engine_is_built_verified_profiled_and_refused_where_kernels_are_missing(
    dropped_in, tiny_model, tmp_path, capfd
):
    engine = tmp_path / "engine"
    build = ["build", "--model", str(tiny_model), "--random-weights", "0", "--policy", NAME, *LENGTHS]
    assert run([*build, "--no-verify", "-o", str(engine)]) == 0
    capfd.readouterr()
    assert run(["verify", str(engine), "--level", "full", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    checks = [check["name"] for rung in report["rungs"] for check in rung["checks"]]
    for operator in ("KvcCompactThirds", "KvcNewestAttention"):
        assert f"{operator} indices" in checks
        assert f"{operator} caches" in checks
    assert run(["profile", str(engine), "--contexts", "64", "--batch", "1"]) == 0
    assert run(["inspect", str(engine)]) == 0
    assert "the newest" in capfd.readouterr().out
    assert run(["plan", "--model", str(tiny_model), "--policy", NAME, *LENGTHS, "--backend", "tensorrt"]) == 2
    assert "backend tensorrt has no kernel for prompt eviction thirds" in capfd.readouterr().err
    assert run(["verify", str(engine), "--backend", "torch"]) == 0
    assert "prompt eviction, selection and attention run as PyTorch operations" in capfd.readouterr().out


def test_the_tasks_ask_it(dropped_in, tmp_path, capsys):
    command = ["verify", "--level", "tasks", "--model", "retrieval-text", "--tasks", "lines", "--lengths", "384"]
    command += ["--samples", "2", "--modes", "query-aware", "--policies", NAME, "--budgets", "32"]
    assert run([*command, "--output-dir", str(tmp_path / "out"), "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["policy"] for cell in cells if cell["scores"]} == {"full", NAME}
