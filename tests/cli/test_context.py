"""`kvc-trt context save`, `context inspect` and `run --context`."""

from __future__ import annotations

import json
import os

import pytest

from kvc_trt.cli.main import run
from tests.readable_model import text, with_tokenizer

PROMPT = "".join(text(3 + i % 40) for i in range(200))
QUESTION = text(9, 4, 30)


INT4 = ("--kv-cache", "int4")


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    """Engines that read text: of two policies, and one whose cache has a format."""
    directory = tmp_path_factory.mktemp("contexts")
    model = with_tokenizer(tiny_model, directory / "model")
    limits = ("--token-budget", "32", "--max-input-len", "256", "--max-output-len", "32", "--no-verify")
    for name, policy, more in (("rocketkv", "rocketkv", ()), ("hybrid", "hybrid", ()), ("int4", "rocketkv", INT4)):
        arguments = ["build", "--model", str(model), "--policy", policy, *limits, *more]
        assert run([*arguments, "-o", str(directory / name)]) == 0
    return directory


@pytest.fixture(scope="module")
def engine(engines):
    return str(engines / "rocketkv")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompt") / "long.txt"
    path.write_text(PROMPT, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def context(engine, prompt_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("context") / "long.context"
    assert run(["context", "save", engine, "--prompt-file", prompt_file, "-o", str(path)]) == 0
    return str(path)


def outputs(*arguments, capfd):
    capfd.readouterr()
    assert run(["run", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)["outputs"]


def failure(*arguments, capfd, code=2):
    capfd.readouterr()
    assert run([str(argument) for argument in arguments]) == code
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("error:") == 1
    return printed.err


RULES = ("--max-new-tokens", "6", "--ignore-eos")


def test_an_answer_continues_from_a_saved_context_unchanged(engine, context, prompt_file, capfd):
    (direct,) = outputs(engine, "--prompt-file", prompt_file, *RULES, capfd=capfd)
    (found,) = outputs(engine, "--context", context, *RULES, capfd=capfd)
    assert found["token_ids"] == direct["token_ids"]
    assert found["text"] == direct["text"]
    assert found["cache"] == direct["cache"]
    assert (found["prompt_token_ids"], found["reused_tokens"], direct["reused_tokens"]) == ([], 200, 0)


def test_a_prompt_continues_the_context_and_a_batch_of_them_too(engine, context, tmp_path, capfd):
    (found,) = outputs(engine, "--context", context, "--prompt", QUESTION, *RULES, capfd=capfd)
    assert found["prompt_token_ids"] == [9, 4, 30]
    assert found["cache"]["logical"] == 200 + 3 + 5
    (tmp_path / "ids").write_text("[[9, 4, 30], [7]]")
    batch = outputs(engine, "--context", context, "--prompt-ids", str(tmp_path / "ids"), *RULES, capfd=capfd)
    assert batch[0]["token_ids"] == found["token_ids"]
    assert [output["reused_tokens"] for output in batch] == [200, 200]


def test_the_summary_says_what_was_reused(engine, context, capfd):
    capfd.readouterr()
    assert run(["run", engine, "--context", context, *RULES, "--stream"]) == 0
    assert "200 tokens of a stored context | 0 prompt tokens | 6 new (length)" in capfd.readouterr().err
    assert run(["run", engine, "--context", context, "--prompt", QUESTION, *RULES]) == 0
    summary = capfd.readouterr().err
    assert "200 tokens of a stored context | 3 prompt tokens | 6 new (length)" in summary


def test_a_context_can_go_on_from_another(engine, context, tmp_path, capfd):
    more = tmp_path / "more"
    assert run(["context", "save", engine, "--context", context, "--prompt", QUESTION, "-o", str(more)]) == 0
    (fed,) = outputs(engine, "--context", context, "--prompt", QUESTION, *RULES, capfd=capfd)
    (found,) = outputs(engine, "--context", str(more), *RULES, capfd=capfd)
    assert found["token_ids"] == fed["token_ids"]
    assert found["reused_tokens"] == 203


def test_save_says_what_it_stored(engine, prompt_file, tmp_path, capfd):
    file = tmp_path / "context"
    assert run(["context", "save", engine, "--prompt-file", prompt_file, "-o", str(file), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["context"], report["bytes"]) == (str(file), file.stat().st_size)
    assert report["logical_length"] == 200
    assert max(report["cache_lengths"]) < 200
    assert "exists and is not replaced" in failure(
        "context", "save", engine, "--prompt-file", prompt_file, "-o", file, capfd=capfd
    )
    assert run(["context", "save", engine, "--prompt", PROMPT, "-o", str(file), "--force"]) == 0
    assert capfd.readouterr().out.startswith(f"{file}: 200 tokens in ")
    assert os.listdir(tmp_path) == ["context"]


def test_inspect_shows_a_context_without_its_engine(engine, context, capfd):
    capfd.readouterr()
    assert run(["context", "inspect", context]) == 0
    shown = capfd.readouterr().out
    assert f"{context}: intact, written by kvc-trt" in shown
    assert "policy  rocketkv, token budget 32" in shown
    assert "format  auto" in shown
    assert "text    200 tokens" in shown
    assert "model   model (fp32 weights)" in shown
    assert run(["context", "inspect", context, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["intact"] is True
    assert (report["logical_length"], report["kv_cache"]) == (200, "auto")
    assert report["tensors"]["k.1"]["shape"] == [2, report["cache_lengths"][1], 16]
    assert report["tensors"]["logits"] == {"dtype": "float32", "shape": [50]}


def test_a_context_in_a_format_is_smaller_goes_on_and_fits_no_other_format(
    engines, engine, context, prompt_file, tmp_path, capfd
):
    file, same = str(tmp_path / "context"), str(engines / "int4")
    assert run(["context", "save", same, "--prompt-file", prompt_file, "-o", file]) == 0
    assert os.path.getsize(file) < os.path.getsize(context) / 3
    assert run(["context", "inspect", file]) == 0
    assert "format  int4" in capfd.readouterr().out
    (whole,) = outputs(same, "--prompt-file", prompt_file, "--max-new-tokens", "8", capfd=capfd)
    (found,) = outputs(same, "--context", file, "--max-new-tokens", "8", capfd=capfd)
    assert found["token_ids"] == whole["token_ids"]
    for mine, other, form, wanted in ((engine, file, "int4", "auto"), (same, context, "auto", "int4")):
        said = failure("run", mine, "--context", other, capfd=capfd)
        assert f"has keys and values in format {form}; this engine has {wanted}" in said
        assert f"--kv-cache {form} among them" in said


def test_contexts_of_other_engines_and_changed_files_are_refused(engines, engine, context, tmp_path, capfd):
    other = failure("run", engines / "hybrid", "--context", context, capfd=capfd)
    assert "was made under policy rocketkv, token budget 32; this engine has hybrid, token budget 32" in other
    assert "kvc-trt context save" in other
    with open(context, "rb") as file:
        content = bytearray(file.read())
    content[-1] ^= 1
    changed, short = tmp_path / "changed", tmp_path / "short"
    changed.write_bytes(content)
    short.write_bytes(content[:-9])
    for command in (["run", engine, "--context"], ["context", "inspect"]):
        assert "changed was changed: its checksum" in failure(*command, changed, capfd=capfd)
        assert "damaged" in failure(*command, short, capfd=capfd)
        assert "cannot read" in failure(*command, tmp_path / "absent", capfd=capfd)
        assert "not a context" in failure(*command, engines / "rocketkv" / "weights.safetensors", capfd=capfd)


@pytest.mark.parametrize("option", [["--chat", "hello"], ["--messages", "x.json"], ["--system", "be brief"]])
def test_a_conversation_does_not_continue_a_context(option, engine, context, capfd):
    assert "--context goes with --prompt" in failure("run", engine, "--context", context, *option, capfd=capfd)


def test_context_save_refuses_two_prompts_and_none(engine, tmp_path, capfd):
    (tmp_path / "ids").write_text("[[9], [4]]")
    said = failure("context", "save", engine, "--prompt-ids", tmp_path / "ids", "-o", tmp_path / "c", capfd=capfd)
    assert "a context is of one prompt, found 2" in said
    assert "give exactly one of" in failure("context", "save", engine, "-o", tmp_path / "c", capfd=capfd)
    assert not (tmp_path / "c").exists()


def test_a_text_that_bypasses_the_chat_template_is_said_once(chat_engine, tmp_path, capfd):
    arguments = ["context", "save", str(chat_engine), "--prompt", PROMPT, "-o", str(tmp_path / "context"), "--force"]
    for raw, warnings in (([], 1), (["--raw"], 0)):
        capfd.readouterr()
        assert run([*arguments, *raw]) == 0
        said = capfd.readouterr().err
        assert said.count("bypasses") == warnings
        assert "BarePromptWarning" not in said
    continued = ["context", "save", str(chat_engine), "--context", str(tmp_path / "context"), "--prompt", QUESTION]
    assert run([*continued, "-o", str(tmp_path / "more")]) == 0
    assert "bypasses" not in capfd.readouterr().err
