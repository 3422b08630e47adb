"""`--json-schema`, `--regex` and `--choice`, and `schema` in Python, with an engine whose tokens write any text."""

from __future__ import annotations

import json
import re
import shutil
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from kvc_trt import Engine, Grammar
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from tests.conftest import TINY_BUILD, TINY_MODEL
from tests.runtime.grammars.byte_tokenizer import END, byte_tokenizer


class Light(BaseModel):
    colour: Literal["red", "green"]
    level: int = Field(ge=10, le=99)


class Short(BaseModel):
    n: Literal[7, 8]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A chat model of random weights with a byte-level tokenizer, whose rows take turns."""
    from safetensors.numpy import save_file

    from kvc_trt.models.random_weights import RandomWeights
    from kvc_trt.models.sources.hugging_face import read_config

    folder = tmp_path_factory.mktemp("grammars")
    model, tokenizer = folder / "model", byte_tokenizer()
    model.mkdir()
    config = {**TINY_MODEL, "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": END}
    (model / "config.json").write_text(json.dumps(config))
    weights = RandomWeights(read_config(model), 0)
    save_file({name: weights.read(name) for name in weights.names()}, model / "model.safetensors")
    tokenizer.save(str(model / "tokenizer.json"))
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}[assistant]"
    (model / "chat_template.jinja").write_text(template)
    assert (
        run(["build", "--model", str(model), *TINY_BUILD, "--max-output-len", "80", "-o", str(folder / "engine")]) == 0
    )
    yield folder / "engine"
    shutil.rmtree(folder)


@pytest.fixture
def ask(engine, capfd):
    def asked(*arguments, code=0):
        capfd.readouterr()
        assert run(["run", str(engine), "--raw", "--prompt", "A light:", *arguments]) == code
        return capfd.readouterr()

    return asked


@pytest.fixture
def schema_file(tmp_path):
    path = tmp_path / "light.json"
    path.write_text(json.dumps(Light.model_json_schema(), indent=2))
    return str(path)


def test_an_answer_is_json_of_the_schema(ask, schema_file):
    Light.model_validate_json(ask("--json-schema", schema_file).out)
    Light.model_validate_json(ask("--json-schema", schema_file, "--stream", "--temperature", "2", "--seed", "1").out)
    [output] = json.loads(ask("--json-schema", schema_file, "--json").out)["outputs"]
    assert output["finish_reason"] == "stop"
    Light.model_validate_json(output["text"])


def test_an_answer_is_one_of_the_choices_or_matches_a_pattern(ask):
    assert ask("--choice", "yes", "--choice", "no").out.strip() in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[a-f]", ask("--regex", "[0-9]{3}-[a-f]").out.strip())


def test_an_answer_that_is_cut_is_warned_of(ask, schema_file):
    printed = ask("--json-schema", schema_file, "--max-new-tokens", "3")
    assert "warning: the answer ended after 3 tokens (length): its JSON may be cut off" in printed.err
    assert "hint: a larger --max-new-tokens" in printed.err
    assert "warning" not in ask("--json-schema", schema_file).err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the JSON schema is not valid JSON"),
        ('{"type": "array", "uniqueItems": true}', "the JSON schema at # has the keyword 'uniqueItems'"),
        ('{"type": "string", "pattern": "(?<=a)b"}', "look-around"),
    ],
)
def test_an_invalid_schema_is_refused_in_one_line(ask, tmp_path, content, message):
    path = tmp_path / "schema.json"
    path.write_text(content)
    printed = ask("--json-schema", str(path), code=2)
    assert message in printed.err
    assert printed.err.startswith((f"error: {path}: ", "error: prompt: the JSON schema cannot be compiled"))
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_a_missing_schema_file_is_named(ask):
    assert "cannot read none.json" in ask("--json-schema", "none.json", code=2).err


def test_two_kinds_of_grammar_at_once_are_refused(ask, schema_file):
    printed = ask("--json-schema", schema_file, "--choice", "a", code=2)
    assert "give one of --json-schema, --choice and --regex" in printed.err


def test_python_takes_a_class_a_mapping_or_a_grammar(engine):
    with Engine.open(engine, threads=1) as opened:
        for schema in (Light, Light.model_json_schema(), json.dumps(Light.model_json_schema())):
            output = opened.generate([1, 2, 3], schema=schema)
            Light.model_validate(output.json())
        answers = opened.chat([[{"role": "user", "content": text}] for text in "ab"], schema=Light)
        assert all(Light.model_validate_json(answer.text) for answer in answers)
        assert opened.generate([1, 2], schema=Grammar.choice(["yes", "no"])).text in ("yes", "no")
        events = list(opened.stream([1, 2], schema=Light))
        Light.model_validate_json("".join(event.text for event in events))
        cut = opened.generate([1, 2, 3], schema=Light, max_new_tokens=2)
        with pytest.raises(InputError, match=r"the answer ended after 2 tokens \(length\) and is not JSON: "):
            cut.json()
        with pytest.raises(InputError, match="a JSON schema is 5, expected a mapping"):
            opened.generate([1, 2], schema=5)


def test_a_question_of_a_conversation_may_have_a_schema_of_its_own(engine):
    with Engine.open(engine, threads=1) as opened:
        conversation = opened.conversation(schema=Grammar.choice(["yes", "no"]))
        assert conversation.ask("Is it on?").output.text in ("yes", "no")
        reply = conversation.ask("Which light?", schema=Short)
        Short.model_validate_json(reply.output.text)
        assert not reply.read_again
        assert conversation.ask("Is it on?").output.text in ("yes", "no")
        with pytest.raises(InputError, match="uniqueItems"):
            conversation.ask("Which?", schema={"uniqueItems": True})
        assert conversation.ask("And now?", schema=Short).output.finish_reason == "stop"
        conversation.close()


def test_a_logit_bias_makes_its_token_the_answer(engine):
    with Engine.open(engine, threads=1) as opened:
        assert opened.generate([1, 2], logit_bias={9: 100}, max_new_tokens=3).token_ids == (9, 9, 9)
