"""YAML as a stranger may write it: plain values only, read in bounded time and memory.

A value is one that JSON can express: text, an integer, a finite number, true, false, null, a list, or a mapping with
keys of text. Scalars without quotes have the meaning of YAML 1.2's core schema, so `no`, `1:30` and `2026-01-01` are
text. Aliases, anchors and tags are refused: a few aliases can describe a value of many gigabytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from kvc_trt.errors import InputError, describe
from kvc_trt.sizes import readable_size

LARGEST_YAML = 32 << 10
"""Characters. Only JSON, whose reader is a hundred times as fast, may be longer."""
MOST_VALUES = 200_000
DEEPEST = 32
"""Lists and mappings within each other."""
_MOST_DIGITS = 100
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


class _Refused(Exception):
    """Names the content of a text for which it is not read."""


def parsed_yaml(text: str, source: str) -> Any:
    """Return the one value that a YAML or JSON text describes; InputError, beginning with `source`, for other texts."""
    try:
        return _as_json(text) if text.lstrip().startswith("{") else _as_yaml(text)
    except _Refused as refused:
        raise InputError(f"{source} is not valid YAML: {refused}") from refused


def _as_json(text: str) -> Any:
    """Read a JSON object; a text that is none may still be a YAML mapping, which is written in braces too."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError):
        return _as_yaml(text)
    _check(found)
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise _Refused(f"key {describe(key)} is repeated")
        seen[key] = value
    return seen


def _constant(name: str) -> float:
    raise _Refused(f"{name} is not a number of JSON")


def _check(value: Any) -> None:
    """Refuse values that JSON can express and this module cannot: half characters, 1e999, absurd nesting."""
    count, level = 0, [value]
    for _ in range(DEEPEST + 1):
        count += len(level)
        if count > MOST_VALUES:
            raise _Refused(f"more than {MOST_VALUES} values")
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += (*one, *one.values())
            elif isinstance(one, list):
                below += one
            else:
                _check_scalar(one)
        if not below:
            return
        level = below
    raise _Refused(f"nested more than {DEEPEST} deep")


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _Refused(f"{describe(value)} holds half of a character (a lone surrogate)") from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise _Refused("a number beyond what 64 bits hold")
    elif isinstance(value, int) and value.bit_length() > _MOST_DIGITS * 4:
        raise _Refused(f"an integer of more than {_MOST_DIGITS} digits")


def _as_yaml(text: str) -> Any:
    if len(text) > LARGEST_YAML:
        raise _Refused(f"{readable_size(len(text))} of it; expected at most {readable_size(LARGEST_YAML)}, or JSON")
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    try:
        return _document(events)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise _Refused(f"{where}{_cut(error.problem)}") from error
    except (ValueError, OverflowError) as error:
        raise _Refused("an escape (\\U) with a number that is no character") from error
    except yaml.YAMLError as error:
        raise _Refused(_cut(error)) from error


def _document(events: Iterator[yaml.Event]) -> Any:
    next(events)  # the start of the stream
    event = next(events)
    if isinstance(event, yaml.StreamEndEvent):
        return None
    value = _value(next(events), events, DEEPEST)
    next(events)  # the end of the document
    if not isinstance(event := next(events), yaml.StreamEndEvent):
        raise _refused(event, "a second document; expected one")
    return value


def _value(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Any:
    if isinstance(event, yaml.AliasEvent):
        raise _refused(event, "an alias (*); write the value again")
    assert isinstance(event, yaml.ScalarEvent | yaml.SequenceStartEvent | yaml.MappingStartEvent)
    if event.anchor is not None:
        raise _refused(event, "an anchor (&); no value is named")
    if event.tag is not None:
        raise _refused(event, "a tag (!); a value says its type itself")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if depth == 0:
        raise _refused(event, f"nested more than {DEEPEST} deep")
    if isinstance(event, yaml.SequenceStartEvent):
        return _items(events, depth - 1)
    return _mapping(events, depth - 1)


def _items(events: Iterator[yaml.Event], depth: int) -> list[Any]:
    found = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        found.append(_value(event, events, depth))
    return found


def _mapping(events: Iterator[yaml.Event], depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _value(event, events, depth)
        if not isinstance(key, str):
            raise _refused(event, f"key {describe(key)} is not text")
        if key in found:
            raise _refused(event, f"key {describe(key)} is repeated")
        found[key] = _value(next(events), events, depth)
    return found


def _scalar(event: yaml.ScalarEvent) -> Any:
    try:
        value = _plain(event.value) if event.implicit[0] else event.value
        _check_scalar(value)
    except _Refused as refused:
        raise _refused(event, str(refused)) from refused
    return value


def _plain(text: str) -> Any:
    """Return the value of a scalar without quotes."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > _MOST_DIGITS:
            raise _Refused(f"an integer of more than {_MOST_DIGITS} digits")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text) if _NUMBER.fullmatch(text) else text


def _refused(event: yaml.Event, problem: str) -> _Refused:
    assert event.start_mark is not None
    return _Refused(f"line {event.start_mark.line + 1}: {problem}")


def _cut(problem: object) -> str:
    return describe(" ".join(str(problem).split()), 200)[1:-1]
