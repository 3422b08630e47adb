"""Files of one's own questions: what is read, and what each broken line says."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.tasks.own import reader
from kvc_trt.tasks.own.reader import line_of, read_data_file

GOOD = {"context": "Ann is 7.", "question": "How old is Ann?", "answers": ["7"]}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines))
    return path


def test_every_field_of_a_data_file_is_read(tmp_path):
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    path = written(
        tmp_path / "own.jsonl",
        {**GOOD, "id": "a", "score": "contains", "max_new_tokens": 9},
        "\n",
        {"id": 7, "set": "talk", "messages": told, "answers": ["me"]},
        {"context": "x ", "question": "y", "answers": ["b"], "score": "classification:first-line",
         "classes": ["b", "c"], "set": "talk", "template": False},
        {"context": "", "question": "Why?"},
    )  # fmt: skip
    data = read_data_file(path)
    assert data.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    first, second, third, fourth = data.records
    assert (first.line, first.id, first.set, first.score, first.max_new_tokens) == (1, "a", "own", "contains", 9)
    assert first.context + first.question == "Ann is 7.\n\nHow old is Ann?"  # a blank line where there is no space
    assert (second.line, second.id, second.messages, second.score) == (3, "7", tuple(told), "f1")
    assert third.context + third.question == "x y"
    assert (third.classes, third.template) == (("b", "c"), False)
    assert (fourth.answers, fourth.question, fourth.max_new_tokens) == (None, "Why?", reader.MAX_NEW_TOKENS)
    assert list(data.sets) == ["own-contains", "talk-f1", "talk-classification:first-line", "own-unanswered"]
    assert list(read_data_file(written(tmp_path / "one.jsonl", GOOD)).sets) == ["one"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"context": "a"', "line 2: not JSON: "),
        ("[1]", "line 2: expected a mapping of names to values, found [1]"),
        ({"context": "a"}, "line 2: missing key 'question'"),
        ({"question": "a"}, "line 2: missing key 'context'"),
        ({"context": " ", "question": ""}, "line 2: context and question are empty"),
        ({"context": 1, "question": "a"}, "line 2: context: input should be a valid string, found 1"),
        ({**GOOD, "answers": "7"}, "line 2: answers: input should be a valid list, found '7'"),
        ({**GOOD, "answers": [7]}, "line 2: answers: input should be a valid string, found 7"),
        ({**GOOD, "answers": []}, "line 2: answers: "),
        ({**GOOD, "anwsers": []}, "line 2: unknown key 'anwsers'; did you mean 'answers'?"),
        ({**GOOD, "score": "rogue-l"}, "line 2: unknown score 'rogue-l'; did you mean 'rouge-l'?"),
        ({**GOOD, "score": "classification"}, "line 2: score classification expects the list of all 'classes'"),
        ({**GOOD, "classes": ["7"]}, "line 2: score f1 takes no 'classes'"),
        ({**GOOD, "score": "count", "answers": ["seven"]}, "line 2: answer 'seven' has no number"),
        ({**GOOD, "score": "choice"}, "line 2: answer '7' is none of the letters"),
        ({**GOOD, "score": "contains", "answers": [""]}, "line 2: an answer is empty"),
        ({"context": "a", "question": "b", "score": "f1"}, "line 2: 'score' without 'answers'"),
        ({**GOOD, "id": "first"}, "line 2: id 'first' is that of line 1 too"),
        ({**GOOD, "max_new_tokens": 0}, "line 2: max_new_tokens: "),
        ({**GOOD, "max_new_tokens": True}, "line 2: max_new_tokens: "),
        ({**GOOD, "messages": [{"role": "user", "content": "a"}]}, "line 2: 'messages' and 'context'"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "line 2: the last message is no question"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "line 2: messages: "),
        ({"messages": [{"role": "user", "content": "a"}], "template": False}, "line 2: 'messages' without the "),
        ('{"context": "\\ud800", "question": "a"}', "line 2: holds half of a character"),
        ("[" * 100_000, "line 2: not JSON: "),
    ],
)  # fmt: skip
def test_an_invalid_line_is_refused_by_number(tmp_path, line, says):
    path = written(tmp_path / "own.jsonl", {**GOOD, "id": "first"}, line)
    with pytest.raises(InputError) as error:
        read_data_file(path)
    assert str(error.value).startswith(f"{path} {says}")


def test_classes_of_one_set_are_the_same(tmp_path):
    line = {**GOOD, "score": "classification", "classes": ["7", "8"]}
    path = written(tmp_path / "own.jsonl", line, {**line, "classes": ["7"]})
    with pytest.raises(InputError, match="line 2: classes are not those of line 1"):
        read_data_file(path)


def test_no_set_takes_the_name_that_another_one_gets(tmp_path):
    lines = [{**GOOD, "set": "a"}, {**GOOD, "set": "a", "score": "exact"}, {**GOOD, "set": "a-exact"}]
    for order, says in ((lines, "line 3: its set becomes 'a-exact', as that of line 2"), (lines[::-1], "line 2: its")):
        with pytest.raises(InputError, match=says):
            _ = read_data_file(written(tmp_path / "own.jsonl", *order)).sets
    assert list(read_data_file(written(tmp_path / "own.jsonl", *lines[:2])).sets) == ["a-f1", "a-exact"]


def test_files_without_questions_and_of_other_bytes(tmp_path):
    for content, says in (
        (b"", "has no questions"),
        (b"\n \n", "has no questions"),
        (b"\xff{}\n", "byte 0 is not UTF-8"),
    ):
        path = tmp_path / "own.jsonl"
        path.write_bytes(content)
        with pytest.raises(InputError, match=says):
            read_data_file(path)
    with pytest.raises(InputError, match="cannot read"):
        read_data_file(tmp_path / "absent.jsonl")


def test_a_long_line_is_refused_before_it_is_in_memory(tmp_path):
    path = tmp_path / "own.jsonl"
    with path.open("wb") as file:
        file.write(b'{"context": "')
        file.seek(100_000_000)  # a hole: it takes no disk
        file.write(b'", "question": "a"}\n')
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"line 1: longer than 32\.0 MiB"):
            read_data_file(path)
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), st.text(max_size=9))
def test_written_lines_read_back_unchanged(tmp_path_factory, context, answer):
    path = tmp_path_factory.mktemp("own") / "own.jsonl"
    path.write_text(line_of({"context": context, "question": " q", "answers": [answer]}), encoding="utf-8", newline="")
    (record,) = read_data_file(path).records
    assert (record.context, record.question, record.answers) == (context, " q", (answer,))
