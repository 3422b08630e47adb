"""Grammars of answers with calls of tools: the frame of a call is fixed, its arguments are of the tool's schema.

They are in the Lark dialect of llguidance, where `%json` is a JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.runtime.chat.tools import Tool
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.tool_calls.reader import THOUGHTS

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it."""


@dataclass(frozen=True)
class CallGrammar:
    """The text of a model's calls. Without `between` there is one."""

    arguments: str
    """The name of a call's field that holds its arguments."""
    before: str = ""
    between: str = ""
    after: str = ""


@dataclass(frozen=True)
class Answer:
    """What an answer may consist of: thoughts, then calls of one of these tools, or else what a grammar allows."""

    tools: Sequence[Tool] = ()
    several: bool = False
    """True if calls may follow one another."""
    otherwise: Grammar | None = None
    thinks: bool = False
    """True if thoughts may come first."""
    thinking: bool = False
    """True if the prompt has begun them."""

    def grammar(self, form: CallGrammar) -> Grammar:
        """Return the grammar of the answer.

        InputError, which names the tool, for parameters that are not a JSON schema of which every keyword is obeyed.
        """
        rules = {"start": self._start, **self._calls(form)}
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

    def _calls(self, form: CallGrammar) -> dict[str, str]:
        if not self.tools:
            return {}
        more = f"({_quoted(form.between)} call)*" if self.several and form.between else ""
        rules = {
            "calls": f"{_quoted(form.before)} call {more} {_quoted(form.after)}",
            "call": " | ".join(f"call_{index}" for index in range(len(self.tools))),
        }
        for index, tool in enumerate(self.tools):
            function = tool["function"]
            frame = f'{{"name": {json.dumps(function["name"])}, "{form.arguments}": '
            rules[f"call_{index}"] = f"{_quoted(frame)} arguments_{index} {_quoted('}')}"
            rules[f"arguments_{index}"] = f"%json {json.dumps(_schema(function))}"
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


def _quoted(text: str) -> str:
    return json.dumps(text)
