from __future__ import annotations

import hashlib
import json
import re

import pytest

from kvc_trt.errors import InputError
from kvc_trt.tasks.dataset import DataSet, draw_data_set, read_data_set
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.tokenizer import TaskTokenizer, load_task_tokenizer
from tests.mutated_json import mutations, replaced
from tests.tasks.conftest import byte_tokenizer, word_tokenizer

BYTES = TaskTokenizer(byte_tokenizer(), "0123", positions=4096)


def draw(name="passkey", **arguments) -> DataSet:
    settings = {"seed": 3, "samples": 4, "target_tokens": 1500, "tokenizer": BYTES}
    return draw_data_set(task(name), **settings | arguments)


def test_the_first_line_says_what_the_samples_are():
    header, *lines = map(json.loads, draw(options={"depth": 0.25}).to_jsonl().splitlines())
    assert header == {
        "task": "passkey",
        "seed": 3,
        "target_tokens": 1500,
        "max_new_tokens": 128,
        "tokenizer": "0123",
        "options": {"depth": 0.25},
        "version": 2,
        "count": 4,
    }
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert all(line["meta"]["depth"] == 0.25 for line in lines)
    assert all(line["answers"][0] in line["context"] for line in lines)


def test_equal_arguments_give_equal_bytes_and_different_ones_differ():
    data_set = draw()
    assert draw().to_jsonl() == data_set.to_jsonl()
    assert data_set.digest == hashlib.sha256(data_set.to_jsonl().encode()).hexdigest()
    others = [draw(seed=4), draw(samples=3), draw(target_tokens=1501), draw(max_new_tokens=5), draw("niah-single-1")]
    assert len({data_set.digest, *(other.digest for other in others)}) == 6
    assert draw(samples=3).samples == data_set.samples[:3]


@pytest.mark.parametrize("name", ["passkey", "lines", "associative-recall"])
def test_a_data_set_reads_back_unchanged(name, tmp_path):
    data_set = draw(name)
    path = tmp_path / "set.jsonl"
    path.write_text(data_set.to_jsonl(), encoding="utf-8")
    assert read_data_set(path) == data_set


def test_token_ids_take_only_the_vocabularys_size_from_a_tokenizer():
    data_set = draw("associative-recall", target_tokens=600)
    assert data_set.tokenizer is None
    assert data_set.options == {"vocabulary_size": 256}
    assert max(int(token) for token in data_set.samples[0].prompt.split()) < 256
    assert draw("associative-recall", target_tokens=600, tokenizer=None).options == {}


def test_impossible_data_sets_are_refused():
    with pytest.raises(InputError, match="passkey: the target is 4097 tokens, the model has 4096 positions"):
        draw(target_tokens=4097)
    with pytest.raises(InputError, match="passkey: the shortest prompt has"):
        draw(target_tokens=100)
    with pytest.raises(InputError, match="task passkey is text, and needs a tokenizer"):
        draw(tokenizer=None)
    with pytest.raises(InputError, match="passkey: the tokenizer cannot spell this task: 'One' is an unknown token"):
        draw(tokenizer=TaskTokenizer(word_tokenizer("pass", "key"), ""))
    with pytest.raises(InputError, match="lines: the tokenizer cannot spell this task"):
        draw("lines", tokenizer=load_task_tokenizer("retrieval-tiny"), target_tokens=300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "is not a data set of kvc-trt"),
        (lambda text: "{}\n", "is not a data set of kvc-trt"),
        (lambda text: "[1]\n", "is not a data set of kvc-trt"),
        (lambda text: text[: len(text) // 2], "is not a data set of kvc-trt"),
        (lambda text: text[: text.rindex('{"answers"')], "has 3 samples, its header says 4"),
        (lambda text: text.replace('"version":2', '"version":3'), "is of version 3, expected 2"),
        (lambda text: text.replace('"task":"passkey"', '"task":"passky"'), "unknown task 'passky'"),
        (lambda text: text.replace('"seed":3,"target', '"sed":3,"target'), "is not a data set of kvc-trt"),
        (lambda text: text.replace('"index"', '"number"'), "is not a data set of kvc-trt"),
        (lambda text: text.replace('"meta":{', '"meta":{"x":NaN,', 1), "holds what a data set cannot"),
        (lambda text: re.sub(r'"answers":\[".*?"\]', '"answers":[]', text), "is not a data set of kvc-trt"),
    ],
)
def test_a_damaged_file_is_refused(change, message, tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(change(draw().to_jsonl()), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_data_set(path)


@pytest.mark.parametrize("line", [0, 2])
def test_a_line_with_any_value_replaced_is_refused_or_a_data_set(line, tmp_path):
    lines = draw("associative-recall", target_tokens=300, samples=2).to_jsonl().splitlines()
    stored, path = json.loads(lines[line]), tmp_path / "set.jsonl"
    stored = {name: value for name, value in stored.items() if name != "meta"} | ({"meta": {"a": 1}} if line else {})
    works, refused = 0, []
    for place, value in mutations(stored):
        path.write_text("\n".join([*lines[:line], json.dumps(replaced(stored, place, value)), *lines[line + 1 :], ""]))
        try:
            found = read_data_set(path)
        except InputError as error:
            refused.append(error.message)
            continue
        works += 1
        assert [sample.prompt + sample.answer_prefix + " ".join(sample.answers) for sample in found.samples]
        assert max(found.target_tokens, found.max_new_tokens) < 2**63
    assert works > 10
    assert refused
    assert all(len(message) < 500 for message in refused)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*none\.jsonl"):
        read_data_set(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_data_set(tmp_path / "binary")
