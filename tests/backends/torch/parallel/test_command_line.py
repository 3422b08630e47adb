"""`--tp` from the command line: built, verified, run and served by ranks; bad input is one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.serving.engine import ServedEngine, ServingSettings
from tests.backends.torch.parallel.test_failures import SECONDS, gone

pytestmark = pytest.mark.slow

ASKED = ("--max-new-tokens", "6", "--ignore-eos", "--json")


def arguments(model, *more):
    lengths = ("--token-budget", "32", "--max-input-len", "256", "--max-output-len", "1024")
    return ["build", "--model", str(model), "--random-weights", "0", *lengths, *more]


@pytest.fixture(scope="module")
def built(tiny_model, tmp_path_factory):
    """An engine for two ranks that was not verified; `auto` finds the backend that takes --tp."""
    path = tmp_path_factory.mktemp("engines") / "two"
    assert run(arguments(tiny_model, "--tp", "2", "--weights", "fp32", "--no-verify", "-o", str(path))) == 0
    return path


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps([5, 9, 11] * 60))
    return str(path)


def answer(capsys, *given):
    assert run(["run", *map(str, given), *ASKED]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_engine_records_its_ranks_and_answers_as_one_process(new_processes, built, prompt, capsys):
    engine = open_engine(built)
    assert engine.build.tensor_parallel == 2
    assert engine.backend == "torch"
    found = answer(capsys, built, "--prompt-ids", prompt)
    assert found["kernels"] == "2 ranks"
    whole = answer(capsys, built, "--prompt-ids", prompt, "--backend", "onnxruntime")
    assert found["outputs"][0]["token_ids"] == whole["outputs"][0]["token_ids"]


def test_an_answer_of_ranks_can_be_proven(built, prompt, tmp_path, capsys):
    """Lists of all KV heads; the reference reads the same tokens and confirms them."""
    proof = tmp_path / "proof.json"
    given = ["--prompt-ids", prompt, "--max-new-tokens", "3", "--ignore-eos", "--kv-proof", "lists", "-o", str(proof)]
    assert run(["run", str(built), *given]) == 0
    assert run(["verify", str(built), "--replay", str(proof)]) == 0


@pytest.mark.exhaustive
def test_ranks_show_and_store_codes_as_one_process(tiny_model, tmp_path, capsys):
    """The rung of codes included: exact keys and values, codes and bounds come from all ranks, by head."""
    given = arguments(tiny_model, "--tp", "2", "--kv-cache", "int8", "--draft-tokens", "2", "--weights", "fp32")
    assert run([*given, "-o", str(tmp_path / "codes")]) == 0
    shown = capsys.readouterr().out
    assert "PASSED" in shown
    assert "drafts: codes unlike their vectors'" in shown


def test_a_build_says_what_is_shared_and_verifies_with_the_ranks(tiny_model, tmp_path, capsys):
    """The kept and read tokens of four ranks of two KV heads are judged like those of any executor."""
    given = arguments(tiny_model, "--tp", "4", "--weights", "fp32", "-o", str(tmp_path / "four"))
    assert run(given) == 0
    shown = capsys.readouterr()
    assert "fewer KV heads (2) than ranks, so each is on 2 of them" in shown.err
    assert "PASSED" in shown.out
    assert run([*given[:-2], "--tp", "1", "-o", str(tmp_path / "one"), "--backend", "torch", "--no-verify"]) == 0
    assert open_engine(tmp_path / "one").build.tensor_parallel is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tp", "3"], "--tp 3: 4 query heads cannot be divided among 3 ranks"),
        (["--tp", "2", "--backend", "onnxruntime"], "tensor_parallel: 2 is for --backend torch, found onnxruntime"),
        (["--tp", "2", "--weights", "int4"], "--weights int4: weights are quantised for ONNX Runtime"),
        (["--tp", "2", "--policy", "h2o"], "h2o"),
        (["--tp", "0"], "tensor_parallel"),
    ],
)
@pytest.mark.parametrize("command", ["build", "plan"])
def test_bad_input_is_refused_in_one_line(command, given, message, tiny_model, tmp_path, capsys):
    common = arguments(tiny_model, *given, "-o", str(tmp_path / "engine"))
    if command == "plan":
        common = ["plan", "--model", str(tiny_model / "config.json"), *common[5:-2]]
    assert run(common) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert all(line.startswith("hint: ") for line in rest)
    assert not (tmp_path / "engine").exists()


def test_profile_refuses_several_ranks(built, capsys):
    assert run(["profile", str(built)]) == 2
    assert "runs on 2 ranks (--tp), and profile measures a single process" in capsys.readouterr().err


def test_a_server_answers_with_ranks(built):
    served = ServedEngine.open(built, ServingSettings(rows=2))
    try:
        served.answer_once()
        ids = served.engine.session().executor.group.process_ids
        assert len(ids) == 2
    finally:
        served.close()
    assert gone(ids)


def children(number):
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def test_a_rank_that_is_killed_ends_the_command_with_code_3(built, prompt):
    command = ["run", str(built), "--prompt-ids", prompt, "--ignore-eos", "--stream"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvc_trt", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[4],
    ) as asked:  # fmt: skip
        assert asked.stdout.read(1), "the first tokens"
        ranks = children(asked.pid)
        os.kill(ranks[-1], signal.SIGKILL)
        start = time.monotonic()
        _, errors = asked.communicate(timeout=SECONDS)
    assert time.monotonic() - start < SECONDS
    assert asked.returncode == 3
    lines = [line for line in errors.splitlines() if line.startswith(("error", "hint"))]
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert "of 2 (process" in lines[0]
    assert "was ended by SIGKILL; the others were ended" in lines[0]
    assert "Traceback" not in errors
    assert len(ranks) == 2
    assert gone(ranks)
