"""Check JSON schemas before they are compiled: their size, and every keyword by name.

If the compiler ignored a keyword, answers could break the schema, so a keyword is either supported or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.files.inputs import parsed_json

MOST_CHARACTERS = 256 << 10
"""The largest number of characters in a grammar's text."""
_DEEPEST = 64
"""The largest number of nesting levels."""
_MOST_SCHEMAS = 5_000
_MOST_COUNTED = 1_000_000
"""The largest number of characters, items or properties that a keyword asks for."""
_MOST_OF_MULTIPLES = 100_000
"""The largest sum of all `multipleOf` values (`_states_of_multiple`); the compiler builds as many states."""
_MOST_NESTED = 600
"""The largest number of rules and brackets in a grammar: each may be nested in the one before, and the time in which
the compiler reports an error grows with the square of the nesting."""
_NESTING = re.compile(r"^[ \t]*[?!]?\w[^:\n]*:|[(\[]", re.MULTILINE)
_QUOTED_OR_SCHEMA = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?|%json\s*')
_MOST_NOT_JSON = 64
"""The largest number of `%json` whose text is not JSON: for each, the text is parsed up to the error."""

_LARGEST = 1 << 53
"""The compiler holds numbers in double precision, which represents every integer up to this one exactly."""

_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator",
    "$schema", "$id", "id", "$comment", "contentMediaType", "contentEncoding",
})  # fmt: skip
"""Keywords that do not change which JSON is allowed."""
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_VALUES = frozenset({"type", "enum", "const", "required", "format", "pattern", "$ref"}) | _NUMBERS | _COUNTS
"""Supported keywords whose values are not schemas."""
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
"""Keywords that people use and that are refused, because the compiler does not support them."""


class SchemaPlace(NamedTuple):
    """A schema and its place inside of the whole schema."""

    pointer: str
    """A JSON pointer that begins with #."""
    schema: Any


def parsed_schema(text: str) -> Any:
    """Parse the JSON text of a schema; InputError for text that is too long, or is not JSON."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"the JSON schema has {len(text)} characters, expected at most {MOST_CHARACTERS}")
    return parsed_json(text, "the JSON schema")


def check_schema(schema: Any) -> None:
    """Raise InputError, naming the place, for a schema that is too large or has an unsupported keyword."""
    if schema is False:
        raise InputError("the JSON schema is false, which allows nothing")
    _check_size([schema], "the JSON schema")
    for pointer, one in schemas_in(schema):
        if isinstance(one, bool):
            continue
        if not isinstance(one, Mapping):
            raise InputError(f"the JSON schema at {pointer} is {describe(one)}, expected an object")
        for name, value in one.items():
            _check_keyword(pointer, name, value)
        _check_properties(pointer, one)


def check_lark(text: str) -> None:
    """Raise InputError for a grammar in Lark's notation with too many rules, or whose schemas are too large in all."""
    schemas, rest, others, start = [], [], 0, 0
    decoder = json.JSONDecoder(parse_int=float)
    while match := _QUOTED_OR_SCHEMA.search(text, start):
        rest.append(text[start : match.start()])
        start = match.end()
        if not match[0].startswith("%"):
            continue
        try:
            schema, start = decoder.raw_decode(text, start)
            schemas.append(schema)
        except (ValueError, RecursionError) as error:  # the compiler says what is wrong with it
            others += 1
            if others > _MOST_NOT_JSON:
                raise InputError(f"the grammar has %json without JSON after it at {others} places") from error
    _check_size(schemas, "the grammar")
    nested = len(_NESTING.findall("".join([*rest, text[start:]])))
    if nested > _MOST_NESTED:
        raise InputError(f"the grammar has {nested} rules and brackets, expected at most {_MOST_NESTED}")


def _check_size(schemas: Iterable[Any], what: str) -> None:
    count, multiples = 0, 0
    for schema in schemas:
        _check_depth(schema)
        for pointer, one in schemas_in(schema):
            count += 1
            if count > _MOST_SCHEMAS:
                raise InputError(f"{what} holds more than {_MOST_SCHEMAS} schemas")
            multiples += _states_of_multiple(one)
            if multiples > _MOST_OF_MULTIPLES:
                raise InputError(
                    f"{what} at {pointer}/multipleOf is beyond the limit: all of them, without the zeros at their "
                    f"ends, are at most {_MOST_OF_MULTIPLES} together"
                )


def _states_of_multiple(schema: Any) -> int:
    """Return an upper bound of the compiler's states for a schema's `multipleOf`: 25 for 0.25, 3 for 3000."""
    value = schema.get("multipleOf") if isinstance(schema, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0  # _check_keyword refuses it
    number = Decimal(str(value))
    return int("".join(map(str, number.normalize().as_tuple().digits))) if number.is_finite() else 0


def schemas_in(schema: Any) -> Iterator[SchemaPlace]:
    """Yield a schema and all schemas nested in it, each before those nested in it."""
    waiting = [SchemaPlace("#", schema)]
    while waiting:
        place = waiting.pop()
        yield place
        if isinstance(place.schema, Mapping):
            waiting += reversed([*_held(place.pointer, place.schema)])


def _held(pointer: str, schema: Mapping[str, Any]) -> Iterator[SchemaPlace]:
    for name, value in schema.items():
        where = f"{pointer}/{name}"
        if name in _NAMED and isinstance(value, Mapping):
            for key, one in value.items():
                yield SchemaPlace(f"{where}/{_escaped(key)}", one)
        elif isinstance(value, list) and (name in _LISTS or name == "items"):
            for index, one in enumerate(value):
                yield SchemaPlace(f"{where}/{index}", one)
        elif name in _SCHEMA:
            yield SchemaPlace(where, value)


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
    """Return the kind of value that a keyword expects; empty if `value` is of it."""
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
    """Refuse `minProperties` above the required ones if unnamed properties are allowed: an answer could repeat one."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if least <= len(set(required)):
        return
    if schema.get("additionalProperties", True) is not False or schema.get("patternProperties"):
        raise InputError(
            f"the JSON schema at {pointer}/minProperties is {least}, and {len(set(required))} properties are required: "
            "more are supported only where additionalProperties is false"
        )


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Set `additionalProperties` to false wherever a schema has `properties` and does not set it; return the schema."""
    for _, one in schemas_in(schema):
        if isinstance(one, dict) and "properties" in one:
            one.setdefault("additionalProperties", False)
    return schema
