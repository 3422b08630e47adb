"""The directory that Dynamo's frontend reads, made of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.serving.dynamo.model_directory import start_tokens, write_model_directory
from tests.conftest import TINY_BUILD
from tests.readable_model import text, with_template


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "model directory"
    made.mkdir()
    return made


def read(directory: Path, name: str):
    return json.loads((directory / name).read_text())


def test_the_model_directory_has_the_frontends_files(chat_engine, directory):
    engine = open_engine(chat_engine)
    write_model_directory(engine, directory)
    config = read(directory, "config.json")
    assert config["model_type"]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == read(directory, "generation_config.json")["eos_token_id"] == [2, 7, 8]
    assert config["max_position_embeddings"] == engine.parameters.max_sequence_len
    assert (directory / "chat_template.jinja").read_text() == engine.chat_template.template
    assert "chat_template" not in read(directory, "tokenizer_config.json")


def test_prompts_are_neither_cut_nor_padded(demo_engine, directory):
    write_model_directory(open_engine(demo_engine), directory)
    tokenizer = read(directory, "tokenizer.json")
    assert (tokenizer["truncation"], tokenizer["padding"]) == (None, None)
    assert "model_max_length" not in read(directory, "tokenizer_config.json")
    assert not (directory / "chat_template.jinja").exists()


def test_nothing_is_left_of_an_earlier_model_of_that_name(chat_engine, demo_engine, directory):
    write_model_directory(open_engine(chat_engine), directory)
    write_model_directory(open_engine(demo_engine), directory)
    assert not (directory / "chat_template.jinja").exists()
    assert read(directory, "config.json")["eos_token_id"] == read(directory, "generation_config.json")["eos_token_id"]
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []


def test_an_engine_without_a_tokenizer_is_refused(tiny_engine, directory):
    with pytest.raises(InputError, match="has no tokenizer"):
        write_model_directory(open_engine(tiny_engine), directory)
    assert list(directory.iterdir()) == []


def test_a_text_gets_the_start_token_that_the_frontend_leaves_out(demo_engine):
    engine = open_engine(demo_engine)
    start = start_tokens(engine)
    assert start == (engine.model.bos_token_id,)
    assert [*start, *engine.tokenizer.encode("lamp", add_special_tokens=False).ids] == engine.tokenizer.encode(
        "lamp"
    ).ids


def test_a_model_without_start_tokens_gets_none(chat_engine):
    assert start_tokens(open_engine(chat_engine)) == ()


@pytest.mark.parametrize(("opens_with", "expected"), [(3, (3,)), (9, ())])
def test_a_template_decides_whether_prompts_get_start_tokens(tiny_model, tmp_path, opens_with, expected):
    """A template that begins with them tells chats from texts; one that does not cannot."""
    from tokenizers import Tokenizer, processors

    model = with_template(tiny_model, tmp_path / "model", eos_token_id=[7])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{text(3)} $A", special_tokens=[(text(3), 3)])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": text(opens_with)}))
    engine = tmp_path / "engine"
    assert run(["build", "--model", str(model), *TINY_BUILD, "-o", str(engine)]) == 0
    assert start_tokens(open_engine(engine)) == expected
