"""Read the grammar of an answer from any of the fields in which OpenAI's and vLLM's clients give one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.serving.protocol.errors import refused

_KINDS: Mapping[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}
"""vLLM's kinds of grammars: fields of `structured_outputs` and, with the prefix `guided_`, fields of a request."""
GUIDED = tuple(f"guided_{kind}" for kind in _KINDS)
FORMAT, STRUCTURED = "response_format", "structured_outputs"


def grammar_of(given: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of a request, None without one; ApiError for several grammars, and for an invalid one."""
    found: dict[str, Grammar] = {}
    for name in (FORMAT, STRUCTURED, *GUIDED):
        if name in given:
            try:
                grammar = _READERS[name](given[name])
            except InputError as error:
                raise refused(f"{name}: {error.message}", name) from None
            if grammar is not None:
                found[name] = grammar
    if len(found) > 1:
        raise refused(f"{' and '.join(found)} are given, expected one of them", list(found)[1])
    return next(iter(found.values()), None)


def _format(value: object) -> Grammar | None:
    """Return the grammar of OpenAI's `response_format`."""
    if not isinstance(value, dict):
        raise InputError(f"found {describe(value)}, expected a JSON object with type")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    if kind != "json_schema":
        raise InputError(f"type is {describe(kind)}, expected text, json_object or json_schema")
    described = value.get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        raise InputError(f"json_schema is {describe(described)}, expected a JSON object with name and schema")
    return Grammar.json_schema(described["schema"])


def _structured(value: object) -> Grammar | None:
    """Return the grammar of vLLM's `structured_outputs`."""
    if not isinstance(value, dict):
        raise InputError(f"found {describe(value)}, expected a JSON object with one of {', '.join(_KINDS)}")
    found = []
    for name, one in value.items():
        if one is None or one is False:
            continue
        if name == "json_object" and one is True:
            found.append(Grammar.json_object())
        elif name in _KINDS:
            found.append(_KINDS[name](one))
        else:
            raise InputError(f"unknown field {describe(name)}{did_you_mean(name, (*_KINDS, 'json_object'))}")
    if len(found) > 1:
        raise InputError(f"{len(found)} kinds are given, expected one")
    return found[0] if found else None


_READERS: Mapping[str, Callable[[Any], Grammar | None]] = {
    FORMAT: _format,
    STRUCTURED: _structured,
    **{f"guided_{kind}": made for kind, made in _KINDS.items()},
}
