"""`kvc-trt run --chat` without a question: line by line, each answer a turn. On a terminal: `test_run_typed.py`."""

from __future__ import annotations

import io
import json
import sys

import pytest

from kvc_trt.cli.main import run
from tests.conftest import TINY_BUILD
from tests.readable_model import text

BRIEF = ("--max-new-tokens", "3", "--ignore-eos")
FIRST, SECOND = text(20, 21, 22), text(23)


@pytest.fixture
def talk(chat_engine, capfd, monkeypatch):
    def talked(*arguments, lines=(), code=0, engine=chat_engine, content=None):
        given = "".join(f"{line}\n" for line in lines).encode() if content is None else content
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        capfd.readouterr()
        assert run(["run", str(engine), *arguments]) == code
        return capfd.readouterr()

    return talked


def replies(printed):
    return [json.loads(line) for line in printed.out.splitlines()]


def test_each_line_is_a_question_and_is_read_as_a_turn(talk):
    first, second = replies(talk("--chat", "--json", *BRIEF, lines=[FIRST, "", "  ", SECOND]))
    assert first["read_token_ids"] == [3, 5, 20, 21, 22, 6]
    # The template closes no message: the last token of the answer, then the question.
    assert second["read_token_ids"] == [first["token_ids"][-1], 5, 23, 6]
    assert [len(one["token_ids"]) for one in (first, second)] == [3, 3]
    assert (first["read_again"], second["read_again"]) == (False, False)
    assert second["cache"]["logical"] == 6 + 2 + 4 + 2
    assert [one["question"] for one in (first, second)] == [FIRST, SECOND]


def test_answers_are_those_of_the_whole_conversation(talk, tmp_path):
    """The text is so short that nothing of it is evicted."""
    first, second = replies(talk("--chat", "--json", *BRIEF, lines=[FIRST, SECOND]))
    messages = tmp_path / "messages.json"
    said = [("user", FIRST), ("assistant", text(*first["token_ids"])), ("user", SECOND)]
    messages.write_text(json.dumps([{"role": role, "content": content} for role, content in said]))
    [whole] = json.loads(talk("--messages", str(messages), "--json", *BRIEF).out)["outputs"]
    assert whole["token_ids"] == second["token_ids"]


def test_each_answer_has_its_text_and_a_line_of_figures(talk):
    printed = talk("--chat", *BRIEF, lines=[FIRST, SECOND, "/exit", FIRST])
    assert len(printed.out.splitlines()) == 2
    first, second = printed.err.splitlines()
    assert first.startswith("[6 tokens read in ")
    assert "| 3 new (length) in " in second
    assert "| cache 14 of 14 tokens per layer, " in second


def test_a_system_message_and_a_document_come_first(talk, tmp_path):
    document = tmp_path / "log.txt"
    document.write_text(text(30, 31) + "\n", encoding="utf-8")
    options = ("--system", text(40), "--document", str(document))
    first, second = replies(talk("--chat", "--json", *options, *BRIEF, lines=[FIRST, SECOND]))
    assert first["read_token_ids"] == [3, 4, 40, 5, 30, 31, 0, 0, 20, 21, 22, 6]
    assert second["read_token_ids"][1:] == [5, 23, 6]


def test_a_question_alone_reads_no_input(talk):
    printed = talk("--chat", FIRST, *BRIEF, content=b"\xff")
    assert printed.err.startswith("6 prompt tokens")


def test_a_turn_that_does_not_fit_ends_it_with_the_numbers(talk):
    printed = talk("--chat", *BRIEF, lines=[FIRST, text(9) * 300, SECOND], code=2)
    assert len(printed.out.splitlines()) == 1
    _, error, _ = printed.err.splitlines()
    assert "a turn of 303 tokens" in error


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (("--chat", "--prompt", "a"), b"", "give exactly one of"),
        (("--chat", "--context", "a"), b"", "--context goes with"),
        (("--chat", "--stream", "--json"), b"", "exclude each other"),
        (("--chat",), b"a\n\xff\n", "standard input: line 2 is not UTF-8 text (byte 0)"),
        (("--chat", "--document", "nowhere.txt"), b"", "cannot read nowhere.txt"),
    ],
)
def test_invalid_arguments_and_questions_are_refused(talk, arguments, content, message):
    printed = talk(*arguments, *BRIEF, content=content, code=2)
    assert message in printed.err.splitlines()[-2 if "\nhint" in printed.err else -1]


def test_an_engine_without_turns_says_how_to_build_it_again(talk, chat_engine, tmp_path):
    """Stands for an engine of an earlier version: here the policy's positions forbid turns."""
    model = chat_engine.parent / "model"
    options = ("--policy", "streaming-llm", "--set", "positions=cache", *TINY_BUILD)
    assert run(["build", "--model", str(model), *options, "-o", str(tmp_path / "engine")]) == 0
    printed = talk("--chat", *BRIEF, lines=[FIRST], engine=tmp_path / "engine", code=2)
    assert "a conversation: policy streaming-llm takes no turns" in printed.err


def test_a_conversation_with_a_model_without_a_tokenizer_is_refused(talk, tiny_engine):
    assert "has no tokenizer" in talk("--chat", lines=[FIRST], engine=tiny_engine, code=2).err
