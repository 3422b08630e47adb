"""`kvc-trt tasks` as a user meets it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvc_trt.cli.main import run
from kvc_trt.tasks.registry import all_tasks


@pytest.fixture
def tokenizer(tmp_path) -> str:
    """A checkpoint's directory whose tokenizer has a token for every byte, and whose model has 2,048 positions."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"max_position_embeddings": 2048}')
    return str(directory)


def write(file, *arguments, task="passkey", target="1000"):
    return run(["tasks", "write", task, "--target-tokens", target, "--samples", "3", "-o", str(file), *arguments])


def test_every_task_is_listed(capfd):
    assert run(["tasks"]) == 0
    text = capfd.readouterr().out
    assert all(f"\n{name} " in text for name in all_tasks())
    assert run(["tasks", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capfd.readouterr().out)["tasks"]}
    assert list(listed) == list(all_tasks())
    assert listed["passkey"]["options"] == ["depth"]
    assert {"family", "summary", "scored", "max_new_tokens", "reads"} < set(listed["lines"])


def test_listing_imports_no_heavy_library():
    code = "import sys; from kvc_trt.cli.main import run; run(['tasks']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not {"torch", "onnx", "onnxruntime", "tokenizers", "transformers"} & set(done.stderr.split())


def test_the_printed_digest_is_the_files_and_does_not_change(tokenizer, tmp_path, capfd):
    for name in ("one.jsonl", "two.jsonl"):
        file = tmp_path / name
        assert write(file, "--tokenizer", tokenizer, "--seed", "7") == 0
        digest, printed = capfd.readouterr().out.split()
        assert printed == str(file)
        assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    header, *samples = map(json.loads, file.read_text().splitlines())
    assert header["seed"] == 7
    assert len(samples) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "one.jsonl", "two.jsonl"]


def test_json_stands_alone_on_stdout(tokenizer, tmp_path, capfd):
    file = tmp_path / "set.jsonl"
    assert write(file, "--tokenizer", tokenizer, "--set", "depth=0.5", "--json") == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (answer["task"], answer["samples"]) == ("passkey", 3)
    assert [json.loads(line)["meta"]["depth"] for line in file.read_text().splitlines()[1:]] == [0.5] * 3


def test_token_ids_need_no_tokenizer(tmp_path, capfd):
    assert write(tmp_path / "ids.jsonl", "--set", "vocabulary_size=100", task="associative-recall") == 0
    assert write(tmp_path / "of.jsonl", "--tokenizer", "retrieval-tiny", task="associative-recall") == 0
    header = json.loads((tmp_path / "of.jsonl").read_text().split("\n")[0])
    assert header["options"] == {"vocabulary_size": 326}


def test_the_page_names_every_task_and_a_digest_that_is_true(tmp_path, capfd):
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    assert not [name for name in all_tasks() if f"`{name}`" not in page]
    command = ["associative-recall", "--target-tokens", "1024", "--samples", "100"]
    assert f"kvc-trt tasks write {' '.join(command)} -o recall.jsonl" in page
    assert run(["tasks", "write", *command, "-o", str(tmp_path / "recall.jsonl")]) == 0
    assert f"# {capfd.readouterr().out.split()[0]}  recall.jsonl" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "passky"], "unknown task 'passky'; did you mean 'passkey'?"),
        (["--target", "200"], "passkey: the shortest prompt has"),
        (["--target", "2049"], "passkey: the target is 2049 tokens, the model has 2048 positions"),
        (["--target", "0"], "Invalid value for '--target-tokens'"),
        (["--tokenizer", "nowhere"], "nowhere is neither a file, a directory nor a preset"),
        (["--tokenizer", "llama3.1-8b"], "preset llama3.1-8b ships no tokenizer"),
        (["--tokenizer", "retrieval-tiny"], "passkey: the tokenizer cannot spell this task: 'One' is an unknown"),
        (["--set", "dept=1"], "task passkey has no option 'dept'; did you mean 'depth'?"),
        (["--set", "depth=2"], "passkey: the depth is 2"),
        (["--set", "depth=deep"], "task passkey: depth is 'deep', expected a number"),
        (["--set", "depth"], "--set depth: expected key=value"),
        (["--set", "depth=["], "--set depth=[: the value is not valid YAML"),
        (["--set", "depth=0", "--set", "depth=1"], "--set depth=1: 'depth' is set twice"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(arguments, message, tokenizer, tmp_path, capfd):
    named = {"--task": "task", "--target": "target"}
    if arguments[0] in named:
        code = write(tmp_path / "set.jsonl", "--tokenizer", tokenizer, **{named[arguments[0]]: arguments[1]})
    else:
        code = write(tmp_path / "set.jsonl", "--tokenizer", tokenizer, *arguments)
    assert code == 2
    captured = capfd.readouterr()
    first, *rest = captured.err.splitlines()
    assert first.startswith(f"error: {message}")
    assert all(line.startswith("hint: ") for line in rest)
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_text_needs_a_tokenizer(tmp_path, capfd):
    assert write(tmp_path / "set.jsonl") == 2
    assert "task passkey is text: --tokenizer PATH_OR_PRESET" in capfd.readouterr().err


def test_an_empty_vocabulary_is_refused(tmp_path, capfd):
    Tokenizer(models.BPE({}, [])).save(str(tmp_path / "tokenizer.json"))
    assert write(tmp_path / "set.jsonl", "--tokenizer", str(tmp_path)) == 2
    assert "has an empty vocabulary" in capfd.readouterr().err


def test_an_existing_file_stays_unless_forced(tokenizer, tmp_path, capfd):
    file = tmp_path / "set.jsonl"
    file.write_text("mine")
    assert write(file, "--tokenizer", tokenizer) == 2
    assert "exists and is not replaced" in capfd.readouterr().err
    assert file.read_text() == "mine"
    assert write(file, "--tokenizer", tokenizer, "--force") == 0
    assert file.read_text().startswith("{")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoint", "is a directory; expected the name of a file"),
        ("none/set.jsonl", "is not a directory"),
        ("pipe", "is not a regular file and is not replaced"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(name, message, tokenizer, tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe")
    assert write(tmp_path / name, "--tokenizer", "is not even looked at", "--force") == 2
    assert message in capfd.readouterr().err


def test_a_full_disk_leaves_nothing_half_written(tokenizer, tmp_path, capfd, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert write(tmp_path / "set.jsonl", "--tokenizer", tokenizer) == 3
    assert "no space left while writing" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
