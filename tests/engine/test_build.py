"""Builds through the real command line: repeated, replayed, interrupted, out of disk, and with impossible inputs."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.engine.stages import Stages
from kvc_trt.files.unfinished import locked
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.safetensors_file import TensorPlan, write_safetensors
from tests.models.hostile_tokenizers import PANICS


def digests(engine):
    files = (path for path in engine.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(engine)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def error_of(capfd):
    """Return the error line; asserts that there is exactly one, and no traceback."""
    lines = capfd.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert not any("Traceback" in line for line in lines)
    return errors[0]


def test_the_same_inputs_are_up_to_date(tiny_engine, tiny_arguments, capfd):
    before = (tiny_engine / "manifest.json").read_bytes()
    assert run([*tiny_arguments, "-o", str(tiny_engine)]) == 0
    assert "up to date" in capfd.readouterr().out
    assert (tiny_engine / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("policy", ["full", "rocketkv", "snapkv++", "hybrid", "snapkv-gqa"])
def test_an_engines_config_builds_the_same_engine(tiny_arguments, tmp_path, policy):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run([*tiny_arguments, "--policy", policy, "--token-budget", "64", "-o", str(first)]) == 0
    assert run(["build", "--config", str(first / "config.json"), "-o", str(second), "--no-verify"]) == 0
    assert digests(first) == digests(second)


def test_a_replay_keeps_the_recorded_numbers_unless_the_policy_is_changed(tiny_engine, tmp_path):
    path = tmp_path / "config.json"
    config = json.loads((tiny_engine / "config.json").read_text())
    config["kv_compression"]["parameters"]["top_k"] = 11
    path.write_text(json.dumps(config))
    assert run(["build", "--config", str(path), "-o", str(tmp_path / "same"), "--no-verify"]) == 0
    assert open_engine(tmp_path / "same").parameters.top_k == 11
    changed = ["build", "--config", str(path), "--token-budget", "64", "-o", str(tmp_path / "changed"), "--no-verify"]
    assert run(changed) == 0
    assert open_engine(tmp_path / "changed").parameters.top_k != 11


def test_a_yaml_file_is_overridden_by_set_and_both_by_flags(tiny_model, tmp_path):
    path = tmp_path / "build.yaml"
    path.write_text(
        f"model: {tiny_model}\nrandom_weights: 0\nverify: false\n"
        "max_input_len: 256\nmax_output_len: 16\ntoken_budget: 64\n"
    )
    arguments = ["build", "--config", str(path), "--set", "max_output_len=24", "--set", "token_budget=48"]
    assert run([*arguments, "--token-budget", "32", "-o", str(tmp_path / "engine")]) == 0
    parameters = open_engine(tmp_path / "engine").parameters
    assert (parameters.max_input_len, parameters.max_output_len, parameters.token_budget) == (256, 24, 32)


def test_an_existing_directory_is_refused_and_replaced_only_with_force(tiny_engine, tiny_arguments, capfd):
    before = digests(tiny_engine)
    other = [*tiny_arguments, "--token-budget", "48", "-o", str(tiny_engine)]
    assert run(other) == 2
    assert "different configuration)" in error_of(capfd)
    assert digests(tiny_engine) == before
    assert run([*other, "--force"]) == 0
    assert open_engine(tiny_engine).parameters.token_budget == 48


def test_a_damaged_engine_is_not_up_to_date(tiny_engine, tiny_arguments, capfd):
    (tiny_engine / "decode.onnx").write_bytes(b"x")
    assert run([*tiny_arguments, "-o", str(tiny_engine)]) == 2
    assert "decode.onnx has the wrong size" in error_of(capfd)
    assert run([*tiny_arguments, "-o", str(tiny_engine), "--force"]) == 0
    open_engine(tiny_engine)


def test_force_never_deletes_a_directory_that_is_no_engine(tiny_arguments, tmp_path, capfd):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    assert run([*tiny_arguments, "-o", str(tmp_path / "home"), "--force"]) == 2
    assert "thesis.tex" in error_of(capfd)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "mine"


INTERRUPTED = """
import os, signal, sys
import kvc_trt.graph.build as graph
graph.build_decode = lambda *arguments, **options: os.kill(os.getpid(), signal.{signal}) or signal.pause()
from kvc_trt.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_build_leaves_nothing_and_resumes(tiny_arguments, tmp_path, capfd, name, code, existing):
    output = tmp_path / "out" / "engine"
    if existing:
        assert run([*tiny_arguments, "--token-budget", "48", "-o", str(output)]) == 0
        before = digests(output)
    arguments = [*tiny_arguments, "-o", str(output), "--force"]
    script = INTERRUPTED.format(signal=name)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=600, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if existing:
        assert digests(output) == before
        assert [path.name for path in output.parent.iterdir()] == ["engine"]
    else:
        assert not output.parent.exists() or not list(output.parent.iterdir())
    capfd.readouterr()
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["resumed"] == ["weights", "prefill"]
    assert not [path for path in Path(os.environ["KVC_TRT_CACHE"]).rglob("*") if path.is_file()]


def test_a_build_killed_after_its_last_rename_leaves_nothing_to_the_next(tiny_arguments, tmp_path, monkeypatch, capfd):
    arguments = [*tiny_arguments, "-o", str(tmp_path / "engine")]
    monkeypatch.setattr(Stages, "discard", lambda stages: None)
    assert run(arguments) == 0
    stages = Path(os.environ["KVC_TRT_CACHE"]) / "stages"
    (entry,) = stages.iterdir()
    aside = tmp_path / ".engine.old-0123456789abcdef"
    aside.mkdir()
    with locked(entry), locked(aside):
        assert run(arguments) == 0
        assert list(stages.iterdir()) == [entry]
        assert aside.exists()
    assert run(arguments) == 0
    assert list(stages.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_full_disk_leaves_nothing(tiny_arguments, tmp_path):
    output = tmp_path / "engine"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    arguments = [sys.executable, "-m", "kvc_trt", *tiny_arguments, "-o", str(output)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False, preexec_fn=limit)
    assert done.returncode == 3
    assert "error: no space left while building weights" in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
    assert list(tmp_path.iterdir()) == []
    assert not [path for path in Path(os.environ["KVC_TRT_CACHE"]).rglob("*") if path.is_file()]


def test_a_disk_that_fills_up_at_the_end_keeps_the_old_engine(tiny_engine, tiny_arguments, monkeypatch, capfd):
    from kvc_trt.engine import build

    def full(source, destination):
        destination.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = digests(tiny_engine)
    monkeypatch.setattr(build, "place", full)
    assert run([*tiny_arguments, "--token-budget", "48", "--force", "-o", str(tiny_engine)]) == 3
    assert "no space left while writing" in error_of(capfd)
    assert digests(tiny_engine) == before
    assert [path.name for path in tiny_engine.parent.iterdir()] == [tiny_engine.name]


def checkpoint(directory, tiny_model, change=None):
    """Return a whole Hugging Face directory of the tiny model; `change(name, array)` may edit its tensors."""
    from kvc_trt.models.sources.hugging_face import read_config

    shutil.copytree(tiny_model, directory)
    source = RandomWeights(read_config(directory), 1)
    tensors = {name: source.read(name) for name in source.names()}
    if change is not None:
        tensors = {name: change(name, array) for name, array in tensors.items()}
    plans = [TensorPlan(name, "float32", array.shape, lambda a=array: a) for name, array in tensors.items()]
    write_safetensors(directory / "model.safetensors", plans, {"format": "pt"}, lambda amount: None)
    return directory


def build_checkpoint(directory, output, *more):
    lengths = ["--token-budget", "32", "--max-input-len", "256", "--max-output-len", "32", "--no-verify"]
    return run(["build", "--model", str(directory), *lengths, "-o", str(output), *more])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_weights_are_refused_by_tensor(tiny_model, tmp_path, capfd, value):
    def spoil(name, array):
        if name == "model.layers.1.mlp.up_proj.weight":
            array[3, 5] = value
        return array

    directory = checkpoint(tmp_path / "model", tiny_model, spoil)
    assert build_checkpoint(directory, tmp_path / "engine") == 2
    assert "model.layers.1.mlp.up_proj.weight" in error_of(capfd)
    assert not (tmp_path / "engine").exists()


def test_a_truncated_checkpoint_is_refused(tiny_model, tmp_path, capfd):
    directory = checkpoint(tmp_path / "model", tiny_model)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert build_checkpoint(directory, tmp_path / "engine") == 2
    assert "model.safetensors" in error_of(capfd)


def test_a_changed_checkpoint_is_another_input(tiny_model, tmp_path, capfd):
    directory = checkpoint(tmp_path / "model", tiny_model)
    assert build_checkpoint(directory, tmp_path / "engine") == 0
    assert build_checkpoint(directory, tmp_path / "engine") == 0
    assert "up to date" in capfd.readouterr().out
    shutil.rmtree(directory)
    checkpoint(directory, tiny_model, lambda name, array: array * 1.5)
    assert build_checkpoint(directory, tmp_path / "engine") == 2
    assert "different weights)" in error_of(capfd)


def tokenizer(directory, words):
    vocabulary = {f"w{index}": index for index in range(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    path = directory / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return path


def test_a_fitting_tokenizer_goes_into_the_engine(tiny_model, tmp_path):
    directory = checkpoint(tmp_path / "model", tiny_model)
    path = tokenizer(directory, 50)
    assert build_checkpoint(directory, tmp_path / "engine") == 0
    engine = open_engine(tmp_path / "engine")
    assert engine.tokenizer_file is not None
    assert engine.tokenizer_file.read() == path.read_bytes()


def test_chat_files_go_into_the_engine_and_change_its_digest(tiny_model, tmp_path, capfd):
    directory = checkpoint(tmp_path / "model", tiny_model)
    tokenizer(directory, 50)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (directory / "tokenizer_config.json").write_text('{"bos_token": "w1"}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert build_checkpoint(directory, tmp_path / "engine") == 0
    engine = open_engine(tmp_path / "engine")
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        assert (engine.path / "tokenizer" / name).read_bytes() == (directory / name).read_bytes()
        assert f"tokenizer/{name}" in engine.files
    assert engine.model.eos_token_ids == (2, 3, 4)
    assert engine.chat_template.render([{"role": "user", "content": "w5"}]) == "w5"
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert build_checkpoint(directory, tmp_path / "engine") == 2
    assert "different tokenizer)" in error_of(capfd)


def test_a_configuration_of_the_tokenizer_that_cannot_be_read_is_refused(tiny_model, tmp_path, capfd):
    directory = checkpoint(tmp_path / "model", tiny_model)
    (directory / "tokenizer_config.json").write_text("[]")
    assert build_checkpoint(directory, tmp_path / "engine") == 2
    assert "tokenizer_config.json: expected a JSON object" in error_of(capfd)
    assert not (tmp_path / "engine").exists()


def test_a_tokenizer_of_another_model_is_refused(tiny_model, tmp_path, capfd):
    directory = checkpoint(tmp_path / "model", tiny_model)
    tokenizer(directory, 51)
    assert build_checkpoint(directory, tmp_path / "engine") == 2
    assert "token ids up to 50, vocab_size is 50" in error_of(capfd)


@pytest.mark.parametrize(
    "text", ["", "{}", "not json", '{"model": {"type": "WordLevel"}}', *(one.decode() for one in PANICS.values())]
)
def test_a_malformed_tokenizer_is_refused(tiny_model, tmp_path, capfd, text):
    directory = checkpoint(tmp_path / "model", tiny_model)
    (directory / "tokenizer.json").write_text(text)
    assert build_checkpoint(directory, tmp_path / "engine") == 2
    assert "is not a tokenizer" in error_of(capfd)


def test_a_model_too_large_for_fp32_names_the_ways_out(monkeypatch, tmp_path, capfd):
    from types import SimpleNamespace

    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=39 * 10**9))
    assert (
        run(["build", "--model", "llama3.1-8b", "--random-weights", "0", "-o", str(tmp_path / "x"), "--no-verify"]) == 3
    )
    streams = capfd.readouterr()
    assert "llama3.1-8b in fp32 needs 29.9 GiB" in streams.err
    assert "--weights int8" in streams.err
    assert "--weights int4" in streams.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token-budget", "15"], "token_budget is 15"),
        (["--max-input-len", "2000"], "max_position_embeddings"),
        (["--set", "prompt_budget=16"], "window"),
        (["--set", "pool_kernel=8"], "odd"),
        (["--set", "page_sise=8"], "did you mean 'page_size'"),
        (["--policy", "rocket"], "did you mean 'rocketkv'"),
        (["--policy", "full", "--set", "top_k=4"], "has no top_k"),
        (["--checkpoint", "/nowhere"], "exclude each other"),
        (["--model", "lama3.1-8b"], "did you mean 'llama3.1-8b'"),
        (["--model", "./nowhere"], "nowhere"),
        (["--weights", "int4", "--random-weights", "-1"], "random_weights"),
    ],
)
def test_invalid_settings_are_refused_by_name(tiny_arguments, tmp_path, capfd, arguments, message):
    assert run([*tiny_arguments, *arguments, "-o", str(tmp_path / "engine")]) == 2
    assert message in error_of(capfd)
    assert not (tmp_path / "engine").exists()


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-llm"])
def test_a_backend_that_cannot_run_here_is_refused(tiny_arguments, tmp_path, capfd, backend):
    assert run([*tiny_arguments, "--backend", backend, "-o", str(tmp_path / "engine")]) == 3
    assert f"backend {backend} cannot be used: " in error_of(capfd)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "vocab_size", "architectures"])
@pytest.mark.parametrize("value", [None, -1, 10**12, "many", [], 1.5])
def test_a_model_description_that_cannot_be_is_refused(tiny_model, tiny_arguments, tmp_path, capfd, field, value):
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, field: value}))
    assert run([*tiny_arguments, "--model", str(directory), "-o", str(tmp_path / "engine")]) == 2
    assert "config.json" in error_of(capfd)


def test_a_checkpoint_of_another_architecture_is_not_the_preset(tiny_model, tmp_path, capfd):
    arguments = ["build", "--model", "llama3.1-8b", "--checkpoint", str(tiny_model), "--weights", "int4", "--no-verify"]
    assert run([*arguments, "-o", str(tmp_path / "engine")]) == 2
    assert "is not llama3.1-8b: hidden_size is 64, expected 4096" in error_of(capfd)
