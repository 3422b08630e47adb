"""Check the messages of a conversation that a client sends, and bring them into the form that chat templates read.

Clients send back the answers that they received. So an assistant's message may have `tool_calls` and no content, the
result of a call is a message of the role `tool`, and fields that are null or empty are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kvc_trt.errors import InputError, describe
from kvc_trt.files.foreign_json import foreign_json
from kvc_trt.tool_calls.json_text import begun_object

ROLES = ("system", "user", "assistant", "tool")
LONGEST_MESSAGES = 16 << 20
"""The largest number of characters in a conversation."""
_LONGEST_CUT = 1 << 17
"""The largest number of characters in truncated arguments, which are parsed character by character."""
DEEPEST = 64
"""The largest number of nested levels in a JSON value from a client."""
_LARGEST_INTEGER = 1024
"""The largest number of bits in an integer: that of the largest float."""
_RENAMED = {"developer": "system"}
"""OpenAI's newer name of a role -> the name that templates know."""
_REFUSED = {"function_call": "give tool_calls in its place", "audio": "the model reads text alone"}

Message: TypeAlias = dict[str, Any]
"""`role`, `content`, and further fields that the template may read. All are texts, except for `tool_calls`, and for the
content of an assistant's message with calls, which may be null. A call is {"type", "function": {"name", "arguments"}},
and may have an `id`; its arguments are an object, as templates expect, or a text if they were truncated."""


def check_messages(messages: object, what: str = "messages", *, system: str | None = None) -> list[Message]:
    """Return the messages as plain values; InputError, beginning with `what`, if they are not a conversation.

    Every message has `role` and `content`; the content may be null in an assistant's message with calls. Parts of text
    become one text, the role `developer` becomes `system`, and the arguments of calls become an object. A text that
    is not a JSON object stays a text: a truncated answer has such arguments. `system` is put before the messages as a
    message of that role.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InputError(f"{what}: expected a list of messages, found {describe(messages)}")
    if not messages:
        raise InputError(f"{what}: there is no message, expected at least one")
    called: set[str] = set()
    checked = [_checked(message, f"{what}: message {index}", called) for index, message in enumerate(messages)]
    if system is not None:
        if checked[0]["role"] == "system":
            raise InputError(f"{what}: message 0 has the role system, and another system message is given")
        checked.insert(0, _checked({"role": "system", "content": system}, f"{what}: system message", called))
    length = sum(_characters(value) for message in checked for value in message.values())
    if length > LONGEST_MESSAGES:
        raise InputError(f"{what}: {length} characters, expected at most {LONGEST_MESSAGES}")
    return checked


def with_objects(messages: Sequence[Message]) -> list[Message] | None:
    """Return a conversation in which truncated arguments are objects, made of the part that can be read.

    Return None if no arguments are truncated, or if some are too long or do not begin an object.
    """
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    texts = {call["function"]["arguments"] for call in calls if isinstance(call["function"]["arguments"], str)}
    if not texts or sum(map(len, texts)) > _LONGEST_CUT:
        return None
    try:
        read = {text: json_value(begun_object(text), "arguments") for text in texts}
    except InputError:
        return None
    if None in read.values():
        return None

    def readable(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        given = function["arguments"]
        return {**call, "function": {**function, "arguments": read[given] if isinstance(given, str) else given}}

    return [
        {**message, "tool_calls": [readable(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def json_value(value: object, what: str, *, depth: int = DEEPEST) -> Any:
    """Return a client's value as plain JSON values; InputError, beginning with `what`, for any other value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, what)
    if (isinstance(value, int) and value.bit_length() <= _LARGEST_INTEGER) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return value
    if depth == 0:
        raise InputError(f"{what}: nested more than {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{what}: expected names that are text, found {describe(key)}")
        return {_text(key, what): json_value(one, what, depth=depth - 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(one, what, depth=depth - 1) for one in value]
    raise InputError(f"{what}: expected a JSON value, found {describe(value)}")


def _checked(message: object, what: str, called: set[str]) -> Message:
    """Return one message, checked; `called` holds the ids of earlier calls, and those of this message are added."""
    if not isinstance(message, Mapping):
        raise InputError(f"{what}: expected an object with role and content, found {describe(message)}")
    role = _role(message, what)
    calls = message.get("tool_calls") or None
    if "content" not in message and calls is None:
        raise InputError(f"{what}: content is missing")
    found: Message = {"role": role, "content": None}
    for key, value in message.items():
        if key == "content":
            found[key] = _content(value, what, optional=role == "assistant" and calls is not None)
        elif key == "tool_calls" and (role == "assistant" or value is not None):
            if role != "assistant":
                raise InputError(f"{what}: tool_calls in a message of the role {role}, expected in an assistant's")
            if calls is not None:
                found[key] = _calls(calls, what, called)
        elif key != "role" and value is not None and value != []:
            if key in _REFUSED:
                raise InputError(f"{what}: {key} is not supported: {_REFUSED[key]}")
            found[_text(key, f"{what}: {describe(key)}")] = _text(value, f"{what}: {describe(key)}")
    if role == "user" and not found["content"]:
        raise InputError(f"{what}: content of the user's message is empty")
    answered = found.get("tool_call_id")
    if answered is not None and answered not in called:
        raise InputError(f"{what}: tool_call_id is {describe(answered)}, and no message before it has such a call")
    return found


def _role(message: Mapping[Any, Any], what: str) -> str:
    if "role" not in message:
        raise InputError(f"{what}: role is missing")
    role = _text(message["role"], f"{what}: 'role'")
    role = _RENAMED.get(role, role)
    if role not in ROLES:
        raise InputError(f"{what}: role is {describe(role)}, expected one of {', '.join(ROLES)}")
    return role


def _content(content: object, what: str, *, optional: bool) -> str | None:
    """Return a message's text; parts are joined by newlines."""
    if content is None and optional:
        return None
    if isinstance(content, str) or not isinstance(content, Sequence) or isinstance(content, bytes):
        return _text(content, f"{what}: 'content'")
    texts = []
    for index, part in enumerate(content):
        where = f"{what}: part {index} of content"
        if not isinstance(part, Mapping):
            raise InputError(f"{where}: expected an object with type and text, found {describe(part)}")
        kind = part.get("type")
        if kind != "text":
            raise InputError(f"{where} has the type {describe(kind)}, and the model reads text alone")
        texts.append(_text(part.get("text"), f"{where}: 'text'"))
    return "\n".join(texts)


def _calls(calls: object, what: str, called: set[str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InputError(f"{what}: tool_calls: expected a list of calls, found {describe(calls)}")
    return [_call(call, f"{what}: call {index} of tool_calls", called) for index, call in enumerate(calls)]


def _call(call: object, what: str, called: set[str]) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InputError(f"{what}: expected an object with id, type and function, found {describe(call)}")
    kind, function, name = call.get("type", "function"), call.get("function"), call.get("id")
    if kind != "function":
        raise InputError(f"{what} has the type {describe(kind)}, expected 'function'")
    if not isinstance(function, Mapping):
        raise InputError(f"{what}: function: expected an object with name and arguments, found {describe(function)}")
    found: dict[str, Any] = {"type": "function"}
    if name is not None:
        found["id"] = _text(name, f"{what}: id")
        called.add(found["id"])
    found["function"] = {
        "name": _text(function.get("name"), f"{what}: name of function"),
        "arguments": _arguments(function.get("arguments"), f"{what}: arguments of function"),
    }
    return found


def _arguments(given: object, what: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or unchanged if they are a text that is not a JSON object.

    Some clients send an empty text for {}.
    """
    if not isinstance(given, str):
        return _object(given, what)
    text = _text(given, what)
    try:
        return _object(foreign_json(text or "{}"), what)
    except (ValueError, RecursionError, InputError):
        return text


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{what}: expected a JSON object, found {describe(value)}")
    plain: dict[str, Any] = json_value(value, what)
    return plain


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{what} must be text, found {describe(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} holds half of a character (a lone surrogate)") from None
    return str(value)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return 0 if value is None else len(json.dumps(value, ensure_ascii=False))
