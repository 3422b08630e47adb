"""Grammars of answers with calls of tools: the frame of a call is fixed, its arguments are of the tool's schema.

They are in the Lark dialect of llguidance, where `%json` is a JSON schema.
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
"""Writes a mark into a grammar."""
_NEW_LINE = "\n"
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$comment"})
_OF_OBJECTS = _ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance",
}  # fmt: skip
"""Keywords of a schema of parameters that calls in tags obey."""
_OF_TEXTS = _ANNOTATIONS | {"type", "enum", "const"}
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it."""


@dataclass(frozen=True)
class CallGrammar(ABC):
    """The text of a model's calls. Without `between` there is one."""

    before: str = ""
    between: str = ""
    after: str = ""

    @abstractmethod
    def call(self, place: int, function: Mapping[str, Any], mark_rule: MarkRule) -> dict[str, str]:
        """Return the rules of a call of this function; `call_{place}` is the whole. InputError for its parameters."""


@dataclass(frozen=True)
class JsonCalls(CallGrammar):
    """A JSON object with a name and arguments."""

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
    """The name, a mark, and the arguments as a JSON object."""

    @override
    def call(self, place: int, function: Mapping[str, Any], mark_rule: MarkRule) -> dict[str, str]:
        return {
            f"call_{place}": f"{_quoted(function['name'])} {mark_rule(ARGUMENTS)} arguments_{place}",
            f"arguments_{place}": f"%json {json.dumps(_schema(function))}",
        }


@dataclass(frozen=True)
class XmlCalls(CallGrammar):
    """Tags, and values between them: texts as they are, all others in JSON. Parameters come in the schema's order."""

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
class Answer:
    """The grammar of an answer: thoughts, then calls of one of these tools, or else what a grammar allows."""

    tools: Sequence[Tool] = ()
    several: bool = False
    """True if calls may follow one another."""
    otherwise: Grammar | None = None
    thinks: bool = False
    """True if thoughts may come first."""
    thinking: bool = False
    """True if the prompt has begun them."""

    def grammar(self, form: CallGrammar, special: Mapping[str, int]) -> Grammar:
        """Return the grammar of the answer.

        InputError, which names the tool, for parameters that are not a JSON schema of which every keyword is obeyed.
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
    """True for a grammar that can be part of another one."""
    return grammar.is_json or grammar.kind == "choice"


def _embedded(grammar: Grammar) -> str:
    if not can_embed(grammar):
        raise InputError(f"tools: {grammar.name} cannot be followed where a call may come in its place")
    if grammar.kind == "choice":
        return " | ".join(map(_quoted, grammar.choices()))
    schema = json.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT} if isinstance(schema, dict) else schema)}"


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are always an object; without parameters an empty one."""
    given = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    try:
        Grammar.json_schema(given)
    except InputError as error:
        raise InputError(f"tools: parameters of {function['name']}: {error.message}", hint=error.hint) from error
    return {"type": "object", **given, "x-guidance": _LAYOUT}


def _value(rule: str, function: Mapping[str, Any], whole: Mapping[str, Any], name: str, schema: Any) -> dict[str, str]:
    """Return the rules of one parameter's value, with the tag that ends it."""
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
    """Return what writes a mark into a grammar: special tokens in it by their ids, as no text makes them."""
    texts = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    marks = re.compile(f"({texts})") if texts else None

    def mark_rule(text: str) -> str:
        pieces = [text] if marks is None else [piece for piece in marks.split(text) if piece]
        written = [f"<[{special[piece]}]>" if piece in special else _quoted(piece) for piece in pieces]
        return " ".join(written) or _quoted("")

    return mark_rule


def _quoted(text: str) -> str:
    return json.dumps(text)
