"""`kvc-trt verify --level tasks` as a user calls it: results, files, exit codes, and mistakes in a request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvc_trt.cli.main import run

MODEL = ["verify", "--level", "tasks", "--model", "retrieval-tiny", "--tasks", "key-value", "--lengths", "128"]
SMALL = ["--samples", "5", "--modes", "query-aware"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "tiny"
    settings = ["--model", "retrieval-tiny", "--token-budget", "64", "--max-input-len", "512", "--max-output-len", "16"]
    assert run(["build", *settings, "--no-verify", "-o", str(path)]) == 0
    return path


def test_two_policies_are_measured_and_a_second_run_reuses_the_answers(
    key_value, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = [*MODEL, *SMALL, "--policies", "hybrid,snapkv-gqa", "--budgets", "16,64"]
    stored = tmp_path / "report.json"
    assert run([*arguments, "--output-dir", str(tmp_path / "out"), "--json", "-o", str(stored)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(stored.read_text())
    cells = {(cell["policy"], cell["token_budget"]): cell for cell in found["cells"]}
    assert list(cells) == [("full", None), ("hybrid", 16), ("hybrid", 64), ("snapkv-gqa", 16), ("snapkv-gqa", 64)]
    assert (cells["full", None]["accuracy"], cells["full", None]["evidence"]) == (1.0, True)
    assert "observation window" in cells["snapkv-gqa", 16]["reason"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "results.jsonl", "report.html", "accuracy.csv", "memory-query-aware.png", "budget-query-aware.png",
            "tasks-query-aware.png",
    }  # fmt: skip
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert run([*arguments, "--output-dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before
    text = capsys.readouterr().out
    assert "n = 5 per cell" in text
    assert "n/a: snapkv-gqa 16: the prompt budget" in text


@pytest.mark.slow
def test_missed_bars_of_an_engine_fail_the_command(key_value, engine, tmp_path, capsys):
    arguments = ["verify", str(engine), "--level", "tasks", "--tasks", "key-value", "--lengths", "512"]
    arguments += ["--samples", "5", "--output-dir", str(tmp_path)]
    assert run([*arguments, "--modes", "query-aware", "--minimum-accuracy", "100", "--maximum-loss", "0"]) == 0
    assert "PASSED" in capsys.readouterr().out
    assert run([*arguments, "--modes", "query-aware,query-agnostic", "--minimum-accuracy", "100"]) == 1
    streams = capsys.readouterr()
    assert "FAILED: rocketkv 64 on key-value, 512 tokens, query-agnostic" in streams.out
    assert "expected at least 100 %" in streams.err


def test_questions_longer_than_the_engine_do_not_apply(key_value, engine, tmp_path, capsys):
    arguments = ["verify", str(engine), "--level", "tasks", "--tasks", "key-value", "--lengths", "1024"]
    assert run([*arguments, "--samples", "2", "--output-dir", str(tmp_path)]) == 2
    streams = capsys.readouterr()
    assert "the questions need max_input_len 1019, the engine has 512" in streams.err
    assert "--max-input-len 1019" in streams.err


@pytest.mark.slow
def test_the_shipped_texts_model_answers_as_it_was_built(tmp_path, capsys):
    path = tmp_path / "engine"
    build = ["build", "--model", "retrieval-text", "--token-budget", "64", "--max-input-len", "384", "--no-verify"]
    assert run([*build, "-o", str(path)]) == 0
    capsys.readouterr()
    arguments = ["verify", str(path), "--level", "tasks", "--tasks", "niah-multiquery,lines", "--lengths", "384"]
    assert run([*arguments, "--samples", "4", "--output-dir", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {cell["accuracy"] for cell in found["cells"] if cell["policy"] == "full"} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--level", "tasks"], "either ENGINE or --model"),
        (["somewhere", "--level", "tasks", "--model", "retrieval-tiny"], "either ENGINE or --model"),
        (["somewhere", "--level", "tasks", "--budgets", "64"], "an engine has its own"),
        (["somewhere", "--budgets", "64"], "--budgets goes with --level tasks"),
        ([], "Missing argument 'ENGINE'"),
        ([*MODEL[1:], "--policies", "rocketvk"], "did you mean 'rocketkv'"),
        ([*MODEL[1:], "--policies", "rocketkv,"], "not a list of names"),
        ([*MODEL[1:], "--lengths", "9999"], "the model takes at most 4096"),
        ([*MODEL[1:], "--tasks", "niah-single"], "did you mean 'niah-single-1'"),
        ([*MODEL[1:], "--tasks", "lines"], "cannot spell"),
        ([*MODEL[1:], "--backend", "torch"], "built in memory, for onnxruntime"),
        ([*MODEL[1:], "--max-new-tokens", "0"], "neither a positive number nor a list"),
        ([*MODEL[1:], "--max-new-tokens", "line=8"], "did you mean 'lines'"),
        ([*MODEL[1:], "--steps", "3"], "--max-new-tokens bounds them"),
        ([*MODEL[1:], "--minimum-accuracy", "101"], "0<=x<=100"),
        (["--level", "tasks", "--model", "retrieval-tin"], "did you mean 'retrieval-tiny'"),
    ],
)
def test_wrong_usage_exits_2(key_value, arguments, message, tmp_path, capsys):
    directory = ["--output-dir", str(tmp_path)] if "--level" in arguments else []
    assert run(["verify", *arguments, *directory]) == 2
    assert message in capsys.readouterr().err


def test_results_of_another_seed_are_kept(key_value, tmp_path, capsys):
    arguments = [*MODEL, *SMALL, "--policies", "full", "--budgets", "64", "--output-dir", str(tmp_path)]
    assert run(arguments) == 0
    before = (tmp_path / "results.jsonl").read_bytes()
    assert run([*arguments, "--seed", "1"]) == 2
    assert "seed is 0 there, 1 here" in capsys.readouterr().err
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_help_has_a_section_of_its_own(capsys):
    assert run(["verify", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.index("Options:") < text.index("--steps") < text.index("Options of --level tasks:")
    assert text.index("Options of --level tasks:") < text.index("--budgets")


WITHOUT_TORCH = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Refuses())
from kvc_trt.cli.main import main
main()
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_tasks_need_no_torch(engine, tmp_path):
    asked = ["--tasks", "associative-recall", "--lengths", "256", "--samples", "1", "--modes", "query-aware"]
    done = without_torch("verify", str(engine), "--level", "tasks", *asked, "--output-dir", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    assert "rocketkv" in done.stdout
    model = ["verify", "--level", "tasks", "--model", "retrieval-tiny", *asked, "--budgets", "64"]
    done = without_torch(*model, "--output-dir", str(tmp_path / "all"))
    assert done.returncode == 0, done.stderr
    assert "left out: exact-topk, exact-topk-group, which need PyTorch" in done.stderr
    assert "rocketkv" in done.stdout
    assert "exact-topk" not in done.stdout
    for needing in ("exact-topk", "rocketkv:layer_budget=squeeze"):
        done = without_torch(*model, "--policies", f"rocketkv,{needing}", "--output-dir", str(tmp_path / "named"))
        assert done.returncode == 3
        assert f"error: {needing} needs PyTorch, which is not installed" in done.stderr
        assert f"or leave {needing} out of --policies" in done.stderr
    done = without_torch("verify", str(engine))
    assert done.returncode == 3
    assert "or --level tasks, which compares with the whole cache" in done.stderr
    assert not (tmp_path / "named").exists()
