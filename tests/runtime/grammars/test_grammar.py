"""Grammars by themselves: what is one, which keywords of a schema are obeyed, and hostile ones."""

from __future__ import annotations

import json
import time
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from kvc_trt.errors import InputError
from kvc_trt.runtime import Grammar
from kvc_trt.runtime.grammar.compiler import Grammars
from kvc_trt.runtime.grammar.schema import MOST_CHARACTERS
from tests.runtime.grammars.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.get_vocab_size())
SECONDS = 10.0
"""No time of a test, but far more than a hostile grammar may take."""


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)
    kind: Literal["new", "known"] = "new"


def test_a_schema_comes_in_three_forms():
    schema = {**Person.model_json_schema(), "additionalProperties": False}
    forms = {Grammar.json_schema(form) for form in (schema, json.dumps(schema), json.dumps(schema, indent=2), Person)}
    assert forms == {Grammar("json_schema", json.dumps(schema, separators=(",", ":")))}
    assert Grammar.of(Person) in forms
    assert Grammar.of(Grammar.json_object()) == Grammar.json_object()


@pytest.mark.parametrize("wrong", [5, None, [1], b"{}", int, object(), {"enum": [object()]}, {"maximum": float("nan")}])
def test_values_that_are_no_schema_are_refused(wrong):
    with pytest.raises(InputError, match="JSON schema"):
        Grammar.json_schema(wrong)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "the JSON schema is not valid JSON"),
        ({"type": "array", "uniqueItems": True}, "at # has the keyword 'uniqueItems', which is not supported"),
        ({"properties": {"a": {"not": {}}}}, "at #/properties/a has the keyword 'not'"),
        ({"$defs": {"x/y": {"if": {}}}}, "at #/[$]defs/x~1y has the keyword 'if'"),
        ({"anyOf": [{}, {"contains": {}}]}, "at #/anyOf/1 has the keyword 'contains'"),
        ({"prefixItems": [{"propertyNames": {}}]}, "at #/prefixItems/0 has the keyword 'propertyNames'"),
        ({"minimun": 3}, "at # has the unknown keyword 'minimun'; did you mean 'minimum'"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "the keyword 'x-guidance'"),
        (False, "the JSON schema is false, which allows nothing"),
        ({"enum": [[2**53 + 1]]}, "at #/enum has 9007199254740993, expected numbers from -2.53 to 2.53"),
        ('{"const": 1e400}', "cannot be written as JSON"),
        ({"items": 5}, "at #/items is 5, expected an object"),
        ({"minLength": -1}, "at #/minLength is -1, expected an integer from 0"),
        ({"maxItems": 10**9}, "at #/maxItems is 1000000000, expected an integer from 0"),
        ({"exclusiveMinimum": True, "minimum": 1}, "at #/exclusiveMinimum is True, expected a number"),
        ({"pattern": 5}, "at #/pattern is 5, expected a text"),
        ({"required": "a"}, "at #/required is 'a', expected a list of names"),
        ({"properties": []}, "at #/properties is .*, expected schemas by name"),
        ({"anyOf": {}}, "at #/anyOf is .*, expected a list of schemas"),
        ({"minProperties": 2, "required": ["a"]}, "at #/minProperties is 2, and 1 properties are required"),
    ],
)
def test_unsupported_parts_of_a_schema_are_refused_by_place(schema, message):
    with pytest.raises(InputError, match=message) as refused:
        Grammar.json_schema(schema)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "text"}, "Invalid type: text"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "at #/properties/a: .*look-around"),
        ({"type": "array", "items": {"format": "zip"}}, "at #/items: Unknown format: zip"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "https://example.org/schema"}, "does not fetch"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum .* greater than maximum"),
        ({"$ref": "#"}, "JSON schema"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_in_one_line(schema, message):
    with pytest.raises(InputError, match=message) as refused:
        GRAMMARS.check(Grammar.json_schema(schema), "prompt 3")
    assert refused.value.message.startswith("prompt 3: the JSON schema")
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "schema",
    [
        Person,
        {"type": "object", "properties": {"x": {"type": "array", "items": {"$ref": "#"}}}},
        {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"oneOf": [{"type": "integer"}, {"type": "string"}], "title": "t", "$comment": "c", "x-order": 1},
        {"allOf": [{"type": "integer"}, {"minimum": 3}], "examples": [3], "default": 3},
        {"type": "object", "minProperties": 1, "properties": {"a": {}}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        {"items": [{"type": "integer"}], "additionalItems": False},
        True,
        {},
    ],
)
def test_supported_schemas_compile(schema):
    GRAMMARS.check(Grammar.json_schema(schema), "prompt")


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def referring(count):
    """Objects that hold one another by references."""
    refer = [{"properties": {"a": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(count)]
    return {"$defs": {str(n): one for n, one in enumerate([*refer, {"type": "null"}])}, "$ref": "#/$defs/0"}


HOSTILE = {
    "depth": lambda: Grammar.json_schema(deep(5000)),
    "depth of text": lambda: Grammar.json_schema('{"items":' * 50_000 + "{}" + "}" * 50_000),
    "depth of a value": lambda: Grammar.json_schema('{"const":' + "[" * 90 + "]" * 90 + "}"),
    "characters": lambda: Grammar.json_schema({"const": "x" * MOST_CHARACTERS}),
    "schemas": lambda: Grammar.json_schema({"anyOf": [{} for _ in range(20_000)]}),
    "optional properties": lambda: Grammar.json_schema(
        {"type": "object", "properties": {f"p{n}": {} for n in range(3000)}}
    ),
    "schemas of a grammar": lambda: Grammar.lark(
        "start: %json " + json.dumps({"properties": {f"p{n}": {} for n in range(6000)}})
    ),
    "schemas of a grammar's parts": lambda: Grammar.lark(
        "start: a | b\n" + "\n".join(f"{one}: %json {json.dumps({'anyOf': [{}] * 3000})}" for one in "ab")
    ),
    "depth of a grammar's schema": lambda: Grammar.lark("start: %json " + json.dumps(deep(70))),
    "parts that are no schemas": lambda: Grammar.lark("start: " + "%json [" * 10_000),
    "rules": lambda: Grammar.lark("start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(9000))),
    "brackets": lambda: Grammar.lark("start: a0\n" + "\n".join(f"a{n}: (((a{n + 1})?)*)?" for n in range(200))),
    "rules up to an error": lambda: Grammar.lark("start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(500))),
    "references": lambda: Grammar.json_schema(referring(2400)),
    "a multiple": lambda: Grammar.json_schema({"type": "integer", "multipleOf": 999_983}),
    "multiples": lambda: Grammar.json_schema({"anyOf": [{"multipleOf": 997 + n / 10} for n in range(2000)]}),
    "a multiple in a grammar": lambda: Grammar.lark(
        'start: "%json" /"/ %json {"type": "integer", "multipleOf": 999983}'
    ),
    "a wrong schema among references": lambda: Grammar.json_schema(
        {**referring(1500), "properties": {"a": {"pattern": "(?=a)b"}}}
    ),
    "repeated repetitions": lambda: Grammar.regex("((((a{99}){99}){99}){99})b"),
    "repetitions": lambda: Grammar.regex("(a{1000}){1000}"),
    "a rule of itself": lambda: Grammar.lark("start: start"),
    "references around": lambda: Grammar.json_schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "half a character": lambda: Grammar.regex("\ud800"),
    "no choices": lambda: Grammar.choice([]),
    "a choice that is empty": lambda: Grammar.choice(["a", ""]),
    "a choice that is no text": lambda: Grammar.choice(["a", 5]),
    "choices that are one": lambda: Grammar.choice("abc"),
    "a JSON text that is no list": lambda: Grammar("choice", "{}"),
    "an unknown kind": lambda: Grammar("yaml", "a"),
    "an empty pattern": lambda: Grammar.regex(""),
    "nothing but an empty answer": lambda: Grammar.regex("()"),
}


@pytest.mark.slow
@pytest.mark.parametrize("made", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_is_refused_at_once(made):
    start = time.process_time()
    with pytest.raises(InputError) as refused:
        GRAMMARS.check(made(), "prompt")
    assert time.process_time() - start < SECONDS
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"type": "string", "minLength": 900_000}),
        Grammar.json_schema({"type": "array", "minItems": 900_000, "items": {"type": "integer"}}),
        Grammar.json_schema({"type": "string", "pattern": "(a|b)*a(a|b){25}"}),
        Grammar.regex("(.*a){30}"),
        Grammar.choice([f"choice {n}: $^.*" for n in range(5000)]),
        Grammar.json_schema({"type": "string", "pattern": "^(.{500}x){500}$"}),
        Grammar.json_schema({"anyOf": [{"pattern": f"^(a{{99{n}}}){{999}}$"} for n in range(9)]}),
        Grammar.json_schema({"properties": {f"p{n}": {} for n in range(3000)}}),
        Grammar.json_schema(referring(1200)),
        Grammar.lark("start: a0\n" + "\n".join(f"a{n}: a{n + 1} | b" for n in range(500)) + '\na500: "x"\nb: /[(]:/'),
        Grammar.json_schema({"type": "number", "multipleOf": 0.25}),
        Grammar.json_schema({"type": "integer", "multipleOf": 86_400}),
        Grammar.lark("start: a0\n" + "\n".join(f"a{n}: a{n + 1} a{n + 1} a{n + 1}" for n in range(40)) + '\na40: "x"?'),
    ],
)
def test_a_large_grammar_is_followed_or_fails_alone(grammar):
    """Each step has its limits: it costs no more than a fraction of a second."""
    matcher = GRAMMARS.matcher(grammar, [0], "row 0")
    start, ended = time.process_time(), "row 0: the answer cannot follow its grammar any further: "
    try:
        for count in range(200):
            allowed = matcher.allowed().nonzero()[0]
            matcher.advance(int(allowed[(7 * count) % len(allowed)]))
            if matcher.is_complete:
                break
    except InputError as error:
        ended = error.message
    assert time.process_time() - start < SECONDS
    assert ended.startswith("row 0: the answer cannot follow its grammar any further: ")


@pytest.mark.parametrize("line", ['"' + r"\"" * 100_000, "a" * 200_000, "/" + r"\/" * 100_000, "%json" * 40_000])
def test_a_long_line_of_a_grammar_is_read_once(line):
    start = time.process_time()
    with pytest.raises(InputError):
        GRAMMARS.check(Grammar.lark(f"start: a\na: {line}\n{line}"), "prompt")
    assert time.process_time() - start < SECONDS


def test_forced_tokens_end_before_a_token_that_the_model_lacks():
    """A grammar can name tokens by number, and the one after the last stands for the end of an answer."""
    size, a = TOKENIZER.get_vocab_size(), TOKENIZER.token_to_id("a")
    for end in (size, 0):
        matcher = GRAMMARS.matcher(Grammar.lark(f'start: "a" <[{end}]>'), [0], "row 0")
        assert matcher.forced() == [a]


def test_compiled_grammars_are_kept_in_bounds():
    made = Grammars(TOKENIZER, TOKENIZER.get_vocab_size())
    for number in range(200):
        made.check(Grammar.regex(f"a{number}"), "prompt")
    assert len(made._compiled) < 100
    assert Grammar.regex("a199") in made._compiled


def test_a_grammar_that_is_compiled_waits_for_no_other():
    GRAMMARS.check(Grammar.regex("ab"), "prompt")
    with GRAMMARS._compiling:
        assert not GRAMMARS.matcher(Grammar.regex("ab"), [0], "row").is_complete


def test_answers_of_one_grammar_do_not_share_a_state():
    first, second = (GRAMMARS.matcher(Grammar.regex("ab"), [0], "row") for _ in range(2))
    a = TOKENIZER.token_to_id("a")
    first.advance(a)
    assert second.allowed()[a]
    assert not first.allowed()[a]
