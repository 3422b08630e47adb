"""JSON schemas before a compiler sees them: limits, and every keyword by name.

A keyword that is not obeyed would give JSON that the schema does not allow, so each one is known or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.files.inputs import parsed_json

MOST_CHARACTERS = 256 << 10
"""Of a grammar's text."""
_DEEPEST = 64
"""Levels of nesting."""
_MOST_SCHEMAS = 10_000
_MOST_COUNTED = 1_000_000
"""The largest number of characters, items or properties that a keyword asks for."""

_LARGEST = 1 << 53
"""Up to here every integer is a number of double precision, in which the compiler holds all numbers."""

_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator",
    "$schema", "$id", "id", "$comment", "contentMediaType", "contentEncoding",
})  # fmt: skip
"""Keywords that allow and forbid nothing."""
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_VALUES = frozenset({"type", "enum", "const", "required", "format", "pattern", "$ref"}) | _NUMBERS | _COUNTS
"""Keywords that are obeyed and hold no schemas."""
_SCHEMA = frozenset({"items", "additionalItems", "additionalProperties"})
"""Keywords that hold a schema."""
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
"""Keywords that hold a list of schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords that hold schemas by name."""
_KNOWN = _ANNOTATIONS | _VALUES | _SCHEMA | _LISTS | _NAMED
_REFUSED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef", "nullable",
})  # fmt: skip
"""Keywords that people use, and that are not obeyed."""


class Place(NamedTuple):
    """A schema inside of a schema."""

    pointer: str
    """A JSON pointer that begins with #."""
    schema: Any


def parsed_schema(text: str) -> Any:
    """Return what the text of a schema holds; InputError for text that is too long, or is no JSON."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"the JSON schema has {len(text)} characters, expected at most {MOST_CHARACTERS}")
    return parsed_json(text, "the JSON schema")


def check_schema(schema: Any) -> None:
    """Raise InputError, naming the place, for a schema that is too large, or says what is not obeyed."""
    _check_depth(schema)
    if schema is False:
        raise InputError("the JSON schema is false, which allows nothing")
    for count, (pointer, one) in enumerate(schemas_in(schema)):
        if count == _MOST_SCHEMAS:
            raise InputError(f"the JSON schema holds more than {_MOST_SCHEMAS} schemas")
        if isinstance(one, bool):
            continue
        if not isinstance(one, Mapping):
            raise InputError(f"the JSON schema at {pointer} is {describe(one)}, expected an object")
        for name, value in one.items():
            _check_keyword(pointer, name, value)
        _check_properties(pointer, one)


def schemas_in(schema: Any) -> Iterator[Place]:
    """Yield a schema and all that it holds, each before its own."""
    waiting = [Place("#", schema)]
    while waiting:
        place = waiting.pop()
        yield place
        if isinstance(place.schema, Mapping):
            waiting += reversed([*_held(place.pointer, place.schema)])


def _held(pointer: str, schema: Mapping[str, Any]) -> Iterator[Place]:
    for name, value in schema.items():
        where = f"{pointer}/{name}"
        if name in _NAMED and isinstance(value, Mapping):
            for key, one in value.items():
                yield Place(f"{where}/{_escaped(key)}", one)
        elif isinstance(value, list) and (name in _LISTS or name == "items"):
            for index, one in enumerate(value):
                yield Place(f"{where}/{index}", one)
        elif name in _SCHEMA:
            yield Place(where, value)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise InputError(f"the JSON schema is nested more than {_DEEPEST} deep")
        level = [
            one
            for value in level
            if isinstance(value, (Mapping, list))
            for one in (value.values() if isinstance(value, Mapping) else value)
        ]


def _check_keyword(pointer: str, name: str, value: Any) -> None:
    if name in _REFUSED or name == "x-guidance":
        raise InputError(f"the JSON schema at {pointer} has the keyword {describe(name)}, which is not supported")
    if name not in _KNOWN and not name.startswith("x-"):
        near = did_you_mean(name, _KNOWN - _ANNOTATIONS)
        raise InputError(f"the JSON schema at {pointer} has the unknown keyword {describe(name)}{near}")
    if name in ("enum", "const") or name in _NUMBERS:
        _check_numbers(f"{pointer}/{name}", value)
    expected = _expected(name, value)
    if expected:
        raise InputError(f"the JSON schema at {pointer}/{name} is {describe(value)}, expected {expected}")


def _check_numbers(where: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, (int, float)) and not -_LARGEST <= one <= _LARGEST:
            raise InputError(f"the JSON schema at {where} has {describe(one)}, expected numbers from -2^53 to 2^53")


def _expected(name: str, value: Any) -> str:
    """Return what the value of a keyword should be; empty if it is."""
    if name in _COUNTS:
        right = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_COUNTED
        return "" if right else f"an integer from 0 to {_MOST_COUNTED}"
    if name in _NUMBERS:
        return "" if isinstance(value, (int, float)) and not isinstance(value, bool) else "a number"
    if name in _LISTS:
        return "" if isinstance(value, list) else "a list of schemas"
    if name in _NAMED:
        return "" if isinstance(value, Mapping) else "schemas by name"
    if name in ("pattern", "format", "$ref"):
        return "" if isinstance(value, str) else "a text"
    if name == "enum":
        return "" if isinstance(value, list) else "a list"
    if name == "required":
        right = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return "" if right else "a list of names"
    return ""


def _check_properties(pointer: str, schema: Mapping[str, Any]) -> None:
    """Refuse a least number of properties that nothing but further names can reach: one could come twice."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if least <= len(set(required)):
        return
    if schema.get("additionalProperties", True) is not False or schema.get("patternProperties"):
        raise InputError(
            f"the JSON schema at {pointer}/minProperties is {least}, and {len(set(required))} properties are required: "
            "more are supported only where additionalProperties is false"
        )


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Close every object of a schema to properties that it does not name, unless it says what those are."""
    for _, one in schemas_in(schema):
        if isinstance(one, dict) and "properties" in one:
            one.setdefault("additionalProperties", False)
    return schema
