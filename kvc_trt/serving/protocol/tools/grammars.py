"""Grammars of answers that must call a tool: the frame of a call is fixed, its arguments are of the tool's schema.

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


def forced_calls(
    form: CallGrammar, tools: Sequence[Tool], *, several: bool, thinks: bool = False, thinking: bool = False
) -> Grammar:
    """Return the grammar of an answer that calls one of these tools, or `several` after another.

    A model that `thinks` may do so first; `thinking`, it has begun to. InputError, which names the tool, for parameters
    that are not a JSON schema of which every keyword is obeyed.
    """
    calls = f"{_quoted(form.before)} call {_quoted(form.after)}"
    if several and form.between:
        calls = f"{_quoted(form.before)} call ({_quoted(form.between)} call)* {_quoted(form.after)}"
    opening, closing = map(_quoted, THOUGHTS)
    if thinking:
        start = f"thoughts /\\s{0, 4}/ {calls}"
    elif thinks:
        start = f"({opening} thoughts /\\s{0, 4}/)? {calls}"
    else:
        start = calls
    lines = [f"start: {start}", "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        function = tool["function"]
        frame = f'{{"name": {json.dumps(function["name"])}, "{form.arguments}": '
        lines.append(f"call_{index}: {_quoted(frame)} arguments_{index} {_quoted('}')}")
        lines.append(f"arguments_{index}: %json {json.dumps(_schema(function))}")
    if thinks:
        lines.append(f"thoughts[suffix={closing}]: /(?s:.*)/")
    return Grammar.lark("\n".join(lines))


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
