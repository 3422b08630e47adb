"""Grammars of answers with tool calls: the frame of a call is fixed, its arguments follow the tool's JSON schema.

They are written in the Lark dialect of llguidance, in which `%json` embeds a JSON schema.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from typing_extensions import override

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.chat.tools import Tool
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.tool_calls.named_call import ARGUMENTS
from kvc_trt.tool_calls.reader import THOUGHTS
from kvc_trt.tool_calls.xml_call import END, FUNCTION, PARAMETER, VALUE_END, is_text, properties_of

MarkRule: TypeAlias = Callable[[str], str]
"""Return the grammar's notation of a mark."""
_NEW_LINE = "\n"
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$comment"})
_OF_OBJECTS = _ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance",
}  # fmt: skip
"""Keywords of a parameters schema that the grammar of calls in tags supports."""
_OF_TEXTS = _ANNOTATIONS | {"type", "enum", "const"}
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's settings for the white space with which chat templates write JSON."""


@dataclass(frozen=True)
class CallGrammar(ABC):
    """The form of the calls in an answer; without `between`, an answer has one call."""

    before: str = ""
    between: str = ""
    after: str = ""

    @abstractmethod
    def call(self, place: int, function: Mapping[str, Any], mark_rule: MarkRule) -> dict[str, str]:
        """Return the rules of a call of this function by name; `call_{place}` is the whole call.

        InputError if its parameters cannot be written as a grammar.
        """


@dataclass(frozen=True)
class JsonCalls(CallGrammar):
    """Calls as a JSON object with a name and arguments."""

    arguments: str = "arguments"
    """The name of the field that holds the arguments."""

    @override
    def call(self, place: int, function: Mapping[str, Any], mark_rule: MarkRule) -> dict[str, str]:
        frame = f'{{"name": {json.dumps(function["name"])}, "{self.arguments}": '
        return {
            f"call_{place}": f"{_quoted(frame)} arguments_{place} {_quoted('}')}",
            f"arguments_{place}": f"%json {json.dumps(_schema(function))}",
        }


@dataclass(frozen=True)
class NamedCalls(CallGrammar):
    """Calls as the name, a mark, and the arguments as a JSON object."""

    @override
    def call(self, place: int, function: Mapping[str, Any], mark_rule: MarkRule) -> dict[str, str]:
        return {
            f"call_{place}": f"{_quoted(function['name'])} {mark_rule(ARGUMENTS)} arguments_{place}",
            f"arguments_{place}": f"%json {json.dumps(_schema(function))}",
        }


@dataclass(frozen=True)
class XmlCalls(CallGrammar):
    """Calls as tags with values between them: texts as is, other values as JSON, parameters in the schema's order."""

    @override
    def call(self, place: int, function: Mapping[str, Any], mark_rule: MarkRule) -> dict[str, str]:
        schema = _schema(function)
        properties, required = properties_of(schema), schema.get("required") or ()
        for name in schema:
            if name not in _OF_OBJECTS:
                raise _not_in_tags(function, f"'{name}'")
        for name in required:
            if name not in properties:
                raise _not_in_tags(function, f"'{name}', which is required and not described,")
        rules: dict[str, str] = {}
        parts = [_quoted(f"{FUNCTION}{function['name']}>\n")]
        for number, (name, one) in enumerate(properties.items()):
            if ">" in name or name != name.strip():
                raise _not_in_tags(function, f"the name {describe(name)}")
            rule = f"value_{place}_{number}"
            rules |= _value(rule, function, schema, name, one)
            part = f"{_quoted(f'{PARAMETER}{name}>' + _NEW_LINE)} {rule}"
            parts.append(part if name in required else f"({part})?")
        return {f"call_{place}": " ".join([*parts, _quoted(END)]), **rules}


@dataclass(frozen=True)
class AnswerParts:
    """The parts of an answer: reasoning, then calls of these tools or instead a text that another grammar allows."""

    tools: Sequence[Tool] = ()
    several: bool = False
    """True if an answer may have several calls."""
    otherwise: Grammar | None = None
    """The grammar of an answer without calls; None if there must be a call."""
    thinks: bool = False
    """True if reasoning may come first."""
    thinking: bool = False
    """True if the prompt ends inside of the reasoning."""

    def grammar(self, form: CallGrammar, special: Mapping[str, int]) -> Grammar:
        """Return the grammar of the answer; `special` has the ids of special tokens by their names.

        InputError, which names the tool, if its parameters are not a JSON schema with supported keywords alone.
        """
        rules = {"start": self._start, **self._calls(form, _mark_rules(special))}
        if self.otherwise is not None:
            rules["otherwise"] = _embedded(self.otherwise)
        if self.thinks or self.thinking:
            rules[f"thoughts[suffix={_quoted(THOUGHTS[1])}]"] = "/(?s:.*)/"
        return Grammar.lark("\n".join(f"{name}: {rule}" for name, rule in rules.items()))

    @property
    def _start(self) -> str:
        said = " | ".join(["calls"] * bool(self.tools) + ["otherwise"] * (self.otherwise is not None))
        if self.thinking:
            return f"thoughts /\\s{{0,4}}/ ({said})"
        return f"({_quoted(THOUGHTS[0])} thoughts /\\s{{0,4}}/)? ({said})" if self.thinks else said

    def _calls(self, form: CallGrammar, mark_rule: MarkRule) -> dict[str, str]:
        if not self.tools:
            return {}
        more = f"({mark_rule(form.between)} call)*" if self.several and form.between else ""
        rules = {
            "calls": f"{mark_rule(form.before)} call {more} {mark_rule(form.after)}",
            "call": " | ".join(f"call_{index}" for index in range(len(self.tools))),
        }
        for index, tool in enumerate(self.tools):
            rules |= form.call(index, tool["function"], mark_rule)
        return rules


def can_embed(grammar: Grammar) -> bool:
    """Return whether a grammar can be part of another one."""
    return grammar.is_json or grammar.kind == "choice"


def _embedded(grammar: Grammar) -> str:
    if not can_embed(grammar):
        raise InputError(f"tools: {grammar.name} cannot be followed where a call may come in its place")
    if grammar.kind == "choice":
        return " | ".join(map(_quoted, grammar.choices()))
    schema = json.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT} if isinstance(schema, dict) else schema)}"


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments, always an object; an empty object without parameters."""
    given = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    try:
        Grammar.json_schema(given)
    except InputError as error:
        raise InputError(f"tools: parameters of {function['name']}: {error.message}", hint=error.hint) from error
    return {"type": "object", **given, "x-guidance": _LAYOUT}


def _value(rule: str, function: Mapping[str, Any], whole: Mapping[str, Any], name: str, schema: Any) -> dict[str, str]:
    """Return the rules of one parameter's value and its end tag."""
    end = f"\n{VALUE_END}\n"
    if not is_text(schema):
        shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        schema = {**shared, **schema, "x-guidance": _LAYOUT} if isinstance(schema, dict) else schema
        return {rule: f"%json {json.dumps(schema)} {_quoted(end)}"}
    for key in schema:
        if key not in _OF_TEXTS:
            raise _not_in_tags(function, f"'{key}' of the text '{name}'")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is None:
        return {f"{rule}[suffix={_quoted(end)}]": "/(?s:.*)/"}
    return {rule: f"({' | '.join(_quoted(one) for one in choices if isinstance(one, str))}) {_quoted(end)}"}


def _not_in_tags(function: Mapping[str, Any], what: str) -> InputError:
    return InputError(f"tools: parameters of {function['name']}: {what} cannot be obeyed in calls of this model's form")


def _mark_rules(special: Mapping[str, int]) -> MarkRule:
    """Return the function that writes a mark into a grammar; special tokens go by id, because no text yields them."""
    texts = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    marks = re.compile(f"({texts})") if texts else None

    def mark_rule(text: str) -> str:
        pieces = [text] if marks is None else [piece for piece in marks.split(text) if piece]
        written = [f"<[{special[piece]}]>" if piece in special else _quoted(piece) for piece in pieces]
        return " ".join(written) or _quoted("")

    return mark_rule


def _quoted(text: str) -> str:
    return json.dumps(text)
