"""`kvc-trt run --chat`, `--messages` and `--system`: a prompt by the model's own template."""

from __future__ import annotations

import json

import pytest

from kvc_trt.cli.main import run
from tests.readable_model import text, with_template

QUESTION = text(20, 21, 22)
USER = {"role": "user", "content": QUESTION}
ASKED = [3, 5, 20, 21, 22, 6]
"""The question as the template writes it: start, user, the three tokens, assistant."""
BRIEF = ("--max-new-tokens", "3", "--ignore-eos")


@pytest.fixture
def ask(chat_engine, capfd):
    def asked(*arguments, code=0, engine=chat_engine):
        capfd.readouterr()
        assert run(["run", str(engine), *arguments]) == code
        return capfd.readouterr()

    return asked


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "messages.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


def prompts(printed):
    return [output["prompt_token_ids"] for output in json.loads(printed.out)["outputs"]]


def test_a_question_goes_through_the_template(ask):
    printed = ask("--chat", QUESTION, "--json", *BRIEF)
    assert prompts(printed) == [ASKED]
    assert printed.err == ""


def test_a_system_message_comes_first(ask, file):
    expected = [[3, 4, 30, *ASKED[1:]]]
    assert prompts(ask("--chat", QUESTION, "--system", text(30), "--json", *BRIEF)) == expected
    assert prompts(ask("--messages", file([USER]), "--system", text(30), "--json", *BRIEF)) == expected
    system = {"role": "system", "content": text(30)}
    assert prompts(ask("--messages", file([system, USER]), "--json", *BRIEF)) == expected


def test_message_files_may_hold_one_conversation_or_several(ask, file):
    turns = [USER, {"role": "assistant", "content": text(40)}, USER]
    written = [3, 5, 20, 21, 22, 6, 40, 5, 20, 21, 22, 6]
    assert prompts(ask("--messages", file(turns), "--json", *BRIEF)) == [written]
    printed = ask("--messages", file([[USER], turns]), "--json", *BRIEF)
    assert prompts(printed) == [ASKED, written]
    assert "== prompt 1 ==" in ask("--messages", file([[USER], turns]), *BRIEF).out


def test_a_document_comes_before_the_question(ask, tmp_path):
    document = tmp_path / "long.txt"
    document.write_text(text(30, 31) + "\n", encoding="utf-8")
    printed = ask("--chat", QUESTION, "--document", str(document), "--json", *BRIEF)
    break_between = [0, 0]
    assert prompts(printed) == [[3, 5, 30, 31, *break_between, 20, 21, 22, 6]]


def test_streams_and_samples_like_any_prompt(ask):
    options = ("--chat", QUESTION, "--temperature", "2", "--seed", "1", "--max-new-tokens", "9", "--ignore-eos")
    assert ask(*options, "--stream").out == ask(*options).out


def test_any_of_several_end_tokens_ends_an_answer(ask, tiny_model, tmp_path, capfd):
    """config.json has one end token and generation_config.json has two others; the model says the second of these."""
    options = ("--chat", QUESTION, "--max-new-tokens", "5", "--json")
    ids = json.loads(ask(*options, "--ignore-eos").out)["outputs"][0]["token_ids"]
    silent = next(token for token in range(9, 20) if token not in ids)
    model = with_template(tiny_model, tmp_path / "model", eos_token_id=[silent, ids[2]])
    limits = ("--token-budget", "32", "--max-input-len", "256", "--max-output-len", "32", "--no-verify")
    assert run(["build", "--model", str(model), *limits, "-o", str(tmp_path / "engine")]) == 0
    [output] = json.loads(ask(*options, engine=tmp_path / "engine").out)["outputs"]
    assert output["finish_reason"] == "stop"
    assert output["token_ids"] == ids[: ids.index(ids[2]) + 1]


class TestBarePrompt:
    def test_a_bare_prompt_warns_that_it_bypasses_the_template(self, ask):
        printed = ask("--prompt", QUESTION, *BRIEF)
        warning, hint, summary = printed.err.splitlines()
        assert warning.startswith("warning: the model has a chat template, and this prompt bypasses it")
        assert "--chat TEXT" in hint
        assert "--raw" in hint
        assert summary.startswith("3 prompt tokens")

    def test_raw_prompts_token_ids_and_models_without_a_template_get_no_warning(self, ask, file, tiny_engine):
        assert len(ask("--prompt", QUESTION, "--raw", *BRIEF).err.splitlines()) == 1
        assert len(ask("--prompt-ids", file([20]), *BRIEF).err.splitlines()) == 1
        assert len(ask("--prompt-ids", file([20]), *BRIEF, engine=tiny_engine).err.splitlines()) == 1


class TestBadInput:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[{", "is not valid JSON"),
            ("[" * 100_000, "is not valid JSON"),
            ("{}", "expected a list of messages, found {}"),
            ('"hello"', "expected a list of messages"),
            ("[]", "there is no message"),
            ("[[]]", "conversation 0: there is no message"),
            ('[[{"role": "user", "content": "a"}], []]', "conversation 1: there is no message"),
            ('[{"role": "user", "content": "a"}, []]', "message 1: expected an object"),
            ('[{"role": "root", "content": "a"}]', "message 0: role is 'root', expected one of system, user"),
            ('[{"role": "user"}]', "message 0: content is missing"),
            (
                '[{"role": "user", "content": ["a"]}]',
                "part 0 of content: expected an object with type and text, found 'a'",
            ),
            ('[{"role": "user", "content": "\\ud800"}]', "half of a character"),
            ('[{"role": "tool", "content": "a"}]', "the chat template refuses these messages: no tools here"),
        ],
    )
    def test_invalid_message_files_are_refused_in_one_line(self, ask, file, content, message):
        printed = ask("--messages", file(content), code=2)
        assert printed.out == ""
        [line] = printed.err.splitlines()
        assert line.startswith("error: ")
        assert message in line

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--chat", "a", "--prompt", "a"),
            ("--chat", "a", "--messages", "b"),
            ("--prompt", "a", "--system", "b"),
            ("--prompt-ids", "a", "--system", "b"),
            ("--prompt", "a", "--document", "b"),
            ("--messages", "a", "--document", "b"),
            ("--chat", "a", "--document", "nowhere.txt"),
            ("--chat", "", "--document", __file__),
            ("--chat", ""),
            ("--messages", "nowhere.json"),
        ],
    )
    def test_invalid_option_combinations_are_refused(self, ask, arguments):
        assert ask(*arguments, code=2).err.startswith("error: ")

    def test_a_second_system_message_is_refused(self, ask, file):
        messages = file([{"role": "system", "content": "a"}, USER])
        assert "message 0 has the role system" in ask("--messages", messages, "--system", "b", code=2).err

    def test_streaming_a_batch_is_refused(self, ask, file):
        assert "--stream shows one answer, found 2" in ask("--messages", file([[USER]] * 2), "--stream", code=2).err

    def test_a_long_conversation_names_the_limit(self, ask):
        assert "has 303 tokens, expected at most 256" in ask("--chat", text(9) * 300, code=2).err

    def test_a_chat_with_a_model_without_a_template_is_refused(self, ask, tiny_engine, tiny_model, tmp_path):
        assert "has no tokenizer" in ask("--chat", "a", engine=tiny_engine, code=2).err
        model = with_template(tiny_model, tmp_path / "model")
        (model / "chat_template.jinja").unlink()
        limits = ("--token-budget", "32", "--max-input-len", "256", "--max-output-len", "32", "--no-verify")
        assert run(["build", "--model", str(model), *limits, "-o", str(tmp_path / "bare")]) == 0
        error, hint = ask("--chat", "a", engine=tmp_path / "bare", code=2).err.splitlines()
        assert error.endswith("has no chat template: its model came without one")
        assert "--prompt TEXT" in hint
