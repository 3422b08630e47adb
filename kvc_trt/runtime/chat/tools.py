"""Check the descriptions of tools that a model may call, and write them out for templates that have no place for them.

Most templates of models that call tools take the descriptions as a variable. For any other template, they go into the
system message, with instructions for calling a tool; calls and results in the conversation become plain text, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.chat.messages import Message, json_value

Tool: TypeAlias = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}; parameters are a JSON schema."""
MOST_TOOLS = 128
"""The largest number of tools, as in OpenAI's API."""
LONGEST_TOOLS = 1 << 20
"""The largest number of characters in all descriptions together."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MENTIONS_TOOLS = re.compile(r"\btool(s|_calls)\b")
_INSTRUCTION = """\
You may call these tools:
{tools}

To call one, answer with nothing but a JSON object: {{"name": "the tool's name", "arguments": {{...}}}}
For several calls, answer with a list of such objects."""


def check_tools(tools: object, what: str = "tools") -> list[Tool]:
    """Return the tools as plain values, without `strict`, which does not belong in a prompt.

    InputError, one line that begins with `what`, if they are not a list of functions with different names.
    """
    if not isinstance(tools, list | tuple):
        raise InputError(f"{what}: expected a list of tools, found {describe(tools)}")
    if len(tools) > MOST_TOOLS:
        raise InputError(f"{what}: {len(tools)} tools, expected at most {MOST_TOOLS}")
    checked = [_checked(tool, f"{what}: tool {index}") for index, tool in enumerate(tools)]
    names = tool_names(checked)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{what}: two tools have the name {describe(twice)}")
    length = len(json.dumps(checked, ensure_ascii=False))
    if length > LONGEST_TOOLS:
        raise InputError(f"{what}: {length} characters, expected at most {LONGEST_TOOLS}")
    return checked


def tool_names(tools: Sequence[Tool]) -> list[str]:
    """Return the names of the tools' functions."""
    return [tool["function"]["name"] for tool in tools]


def mentions_tools(template: str) -> bool:
    """Return whether a template's text uses tools or tool calls."""
    return _MENTIONS_TOOLS.search(template) is not None


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether a message of the conversation has tool calls."""
    return any("tool_calls" in message for message in messages)


def written_out(messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
    """Return a conversation in which tools, calls and results are plain text.

    Results become a user's messages, and consecutive results one message: many templates have no role for results, and
    require that user and assistant alternate.
    """
    written: list[Message] = []
    names: dict[str, str] = {}
    after_result = False
    for message in messages:
        if "tool_calls" in message:
            calls = message["tool_calls"]
            names.update({call["id"]: call["function"]["name"] for call in calls if "id" in call})
            said = [message["content"]] if message["content"] else []
            written.append({"role": "assistant", "content": "\n".join([*said, _called(calls)])})
        elif message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "the tool")
            text = f"Result of {name}: {message['content']}"
            if after_result:
                written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{text}"}
            else:
                written.append({"role": "user", "content": text})
        else:
            written.append(message)
        after_result = message["role"] == "tool"
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=lines)
    if written[0]["role"] == "system":
        first = {**written[0], "content": f"{written[0]['content']}\n\n{instruction}"}
        return [first, *written[1:]]
    return [{"role": "system", "content": instruction}, *written]


def _called(calls: Sequence[Mapping[str, Any]]) -> str:
    functions = [call["function"] for call in calls]
    return json.dumps(functions if len(functions) > 1 else functions[0], ensure_ascii=False)


def _checked(tool: object, what: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise InputError(f"{what}: expected an object with type and function, found {describe(tool)}")
    if tool.get("type") != "function":
        raise InputError(f"{what} has the type {describe(tool.get('type'))}, expected 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InputError(f"{what}: function: expected an object with name and parameters, found {describe(function)}")
    plain = json_value(function, f"{what}: function")
    name = plain.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{what}: name of function is {describe(name)}, expected 1 to 64 letters, digits, '_' and '-'")
    for key, kind, words in (("description", str, "text"), ("parameters", dict, "a JSON schema"), ("strict", bool, "")):
        if plain.get(key) is not None and not isinstance(plain[key], kind):
            expected = words or "true or false"
            raise InputError(f"{what}: {key} of function is {describe(plain[key])}, expected {expected}")
    kept = {key: value for key, value in plain.items() if key != "strict" and value is not None}
    return {"type": "function", "function": kept}
