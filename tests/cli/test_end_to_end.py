"""The main job through the real command line, on the model that the package ships."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvc_trt.tasks.kinds.key_value import generate

pytestmark = pytest.mark.slow
CONTEXT, PAIRS = 512, 8


@pytest.fixture(scope="module")
def kvc_trt(tmp_path_factory):
    """Run `kvc-trt` with these arguments in a process of its own, and return the completed process."""
    environment = {**os.environ, "KVC_TRT_CACHE": str(tmp_path_factory.mktemp("cache") / "kvc-trt")}

    def call(*arguments, code=0):
        command = [sys.executable, "-m", "kvc_trt", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        assert done.returncode == code, done.stderr
        return done

    return call


@pytest.fixture(scope="module")
def engine(kvc_trt, tmp_path_factory):
    """A RocketKV engine, verified by its build."""
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    lengths = ["--token-budget", "64", "--max-input-len", "1024"]
    done = kvc_trt("build", "--model", "retrieval-tiny", "--policy", "rocketkv", *lengths, "-o", directory, "--json")
    result = json.loads(done.stdout)
    assert result["status"] == "built"
    assert result["verification"]["passed"] is True
    return directory


@pytest.fixture(scope="module")
def sample():
    """A question whose answer is in the prompt."""
    return generate(seed=11, index=0, context_tokens=CONTEXT, pairs=PAIRS)


def test_a_repeated_build_is_up_to_date(kvc_trt, engine):
    lengths = ["--token-budget", "64", "--max-input-len", "1024"]
    done = kvc_trt("build", "--model", "retrieval-tiny", "--policy", "rocketkv", *lengths, "-o", engine)
    assert "up to date" in done.stdout


def test_inspect_says_what_was_built(kvc_trt, engine):
    answer = json.loads(kvc_trt("inspect", engine, "--json").stdout)
    assert answer["kv_compression"]["parameters"]["policy"] == "rocketkv"
    assert answer["tokenizer"] is True
    assert answer["checkpoint"]["source"] == "checkpoint shipped with kvc-trt"


def test_a_compressed_cache_answers_the_question(kvc_trt, engine, sample, tmp_path):
    (tmp_path / "prompt.txt").write_text(sample.prompt_text)
    done = kvc_trt("run", engine, "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 8, "--json")
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["text"].split()[:4] == sample.answer_text.split()
    assert output["finish_reason"] == "stop"
    assert output["prompt_token_ids"] == list(sample.prompt_ids)
    assert all(physical < output["cache"]["logical"] for physical in output["cache"]["physical"])


def test_a_streamed_answer_is_the_same_text(kvc_trt, engine, sample):
    done = kvc_trt("run", engine, "--prompt", sample.prompt_text, "--max-new-tokens", 8, "--stream")
    assert done.stdout.split()[:4] == sample.answer_text.split()


def test_a_batch_of_token_ids_answers_row_by_row(kvc_trt, engine, tmp_path):
    samples = [generate(seed=12, index=index, context_tokens=96 + 200 * index, pairs=PAIRS) for index in range(3)]
    (tmp_path / "ids.json").write_text(json.dumps([sample.prompt_ids for sample in samples]))
    done = kvc_trt("run", engine, "--prompt-ids", tmp_path / "ids.json", "--max-new-tokens", 4, "--json")
    outputs = json.loads(done.stdout)["outputs"]
    assert [output["token_ids"] for output in outputs] == [list(sample.answer_ids) for sample in samples]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "the " * 2000], "max_input_len"),
        (["--prompt-file", "/nowhere"], "/nowhere"),
        ([], "exactly one of"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(kvc_trt, engine, arguments, message):
    done = kvc_trt("run", engine, *arguments, code=2)
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_passes_and_finds_tampering(kvc_trt, engine, tmp_path):
    import shutil

    answer = json.loads(kvc_trt("verify", engine, "--level", "logits", "--steps", 4, "--json").stdout)
    assert answer["passed"] is True
    copy = tmp_path / "copy"
    shutil.copytree(engine, copy)
    content = bytearray((copy / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "weights.safetensors").write_bytes(content)
    for command in ("verify", "run", "profile", "inspect"):
        more = ["--prompt", "the"] if command == "run" else []
        assert "weights.safetensors was changed" in kvc_trt(command, copy, *more, code=2).stderr


def test_profile_measures_both_engines(kvc_trt, engine):
    arguments = ["--contexts", 256, "--batch", 1, "--steps", 5, "--prefills", 1]
    answer = json.loads(kvc_trt("profile", engine, *arguments, "--json").stdout)
    assert answer


def test_an_engine_without_a_tokenizer_answers_token_ids_alone(kvc_trt, tmp_path):
    engine = tmp_path / "random"
    lengths = ["--token-budget", "64", "--max-input-len", "256"]
    kvc_trt("build", "--model", "retrieval-tiny", "--random-weights", 0, *lengths, "--no-verify", "-o", engine)
    assert "--prompt-ids" in kvc_trt("run", engine, "--prompt", "the", code=2).stderr
    (tmp_path / "ids.json").write_text("[1, 7, 9]")
    done = kvc_trt(
        "run", engine, "--prompt-ids", tmp_path / "ids.json", "--max-new-tokens", 3, "--json", "--ignore-eos"
    )
    (output,) = json.loads(done.stdout)["outputs"]
    assert len(output["token_ids"]) == 3
    assert output["finish_reason"] == "length"
