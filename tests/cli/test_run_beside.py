"""`kvc-trt run --beside`: a second policy over the same weights, or another engine, answers the same."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from types import SimpleNamespace

import pytest

from kvc_trt import Engine
from kvc_trt.cli.asking.talk import Talk
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.runtime.chat.conversation import Conversation
from tests.conftest import TINY_BUILD, TINY_WEIGHTS
from tests.readable_model import text

BRIEF = ("--max-new-tokens", "6", "--ignore-eos")
QUESTION = text(*range(9, 49)) * 4
"""Longer than what the engine keeps."""


@pytest.fixture(scope="module")
def whole(chat_engine, tmp_path_factory):
    """The same model's engine that keeps everything."""
    path = tmp_path_factory.mktemp("whole") / "engine"
    model = chat_engine.parent / "model"
    assert run(["build", "--model", str(model), "--policy", "full", *TINY_BUILD[2:], "-o", str(path)]) == 0
    return path


@pytest.fixture
def ask(chat_engine, capfd):
    def asked(*arguments, code=0):
        capfd.readouterr()
        assert run(["run", str(chat_engine), *arguments, *BRIEF]) == code
        return capfd.readouterr()

    return asked


def test_the_whole_cache_over_the_engines_weights_is_the_engine_of_full(ask, whole, capfd):
    memory = json.loads(ask("--chat", QUESTION, "--beside", "full", "--json").out)
    directory = json.loads(ask("--chat", QUESTION, "--beside", str(whole), "--json").out)
    assert run(["run", str(whole), "--chat", QUESTION, "--json", *BRIEF]) == 0
    [alone] = json.loads(capfd.readouterr().out)["outputs"]
    for found in (memory, directory):
        assert found["beside"]["policy"] == "full"
        assert found["beside"]["outputs"] == [alone]
        [own] = found["outputs"]
        assert own["cache"]["bytes"] < alone["cache"]["bytes"]
    assert json.loads(ask("--chat", QUESTION, "--json").out)["outputs"] == memory["outputs"]


def test_both_answers_stand_in_two_columns_within_80_characters(ask):
    printed = ask("--chat", QUESTION, "--beside", "full").out.splitlines()
    assert max(map(len, printed)) <= 80
    assert printed[0].split() == ["rocketkv,", "budget", "32", "full"]
    (steps,) = (line for line in printed if "steps of" in line)
    assert steps.count("6 new (length)") == 2
    assert sum(line.count("KiB") for line in printed) >= 2


def test_a_conversation_asks_both(chat_engine, capfd, monkeypatch):
    lines = f"{text(20, 21)}\n{text(23)}\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert run(["run", str(chat_engine), "--chat", "--beside", "full", "--json", *BRIEF]) == 0
    first, second = map(json.loads, capfd.readouterr().out.splitlines())
    assert first["token_ids"] == first["beside"]["token_ids"]  # all of it fits
    assert second["beside"]["policy"] == "full"
    assert second["read_token_ids"] == second["beside"]["read_token_ids"]


def test_a_question_that_one_side_refuses_is_part_of_neither_conversation(chat_engine, monkeypatch):
    given = SimpleNamespace(
        beside="full", threads=1, prefill_precision="f32", sealed=False, system=None, as_json=True,
        rules={"max_new_tokens": 3},
    )  # fmt: skip
    questions = [text(20, 21), text(22), text(23)]
    replies, ask_one = [], Conversation.ask

    def ask(self, question, *args, **settings):
        if question == questions[1] and self is talk.conversations[1]:
            raise InputError("it does not fit here")
        replies.append(ask_one(self, question, *args, **settings))
        return replies[-1]

    monkeypatch.setattr(Conversation, "ask", ask)
    with Engine.open(chat_engine, threads=1) as engine, contextlib.closing(Talk(engine, given)) as talk:
        talk.ask(questions[0])
        with pytest.raises(InputError, match="does not fit"):
            talk.ask(questions[1])
        talk.ask(questions[2])
        first, second = (one.messages for one in talk.conversations)
    assert [one["content"] for one in first if one["role"] == "user"] == [questions[0], questions[2]]
    assert first == second
    assert replies[-2].output.token_ids == replies[-1].output.token_ids
    assert (replies[-2].read_again, replies[-1].read_again) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chat", "a", "--beside", "ful"), "unknown policy 'ful'; did you mean 'full'?"),
        (("--chat", "a", "--beside", "hybrid:page_sise=2"), "unknown key 'page_sise'; did you mean 'page_size'?"),
        (("--chat", "a", "--beside", "./nowhere"), "nowhere does not exist; expected an engine directory"),
        (("--chat", "a", "--beside", "full", "--stream"), "it excludes --context, --stream"),
    ],
)
def test_invalid_arguments_are_refused(ask, arguments, message):
    assert message in ask(*arguments, code=2).err


def test_another_models_engine_is_refused(ask, tiny_model, tmp_path):
    other = tmp_path / "model"
    other.mkdir()
    config = json.loads((tiny_model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    build = ["build", "--model", str(other), *TINY_WEIGHTS, *TINY_BUILD, "-o", str(tmp_path / "engine")]
    assert run(build) == 0
    assert "expected the same model" in ask("--chat", "a", "--beside", str(tmp_path / "engine"), code=2).err
