"""Write the deltas of an answer in OpenAI's form: as chunks of a stream, or as one message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvc_trt.tool_calls.deltas import Arguments, CallStart, Content, Delta, Reasoning


def chunk_of(delta: Delta) -> dict[str, Any]:
    """Return a delta as the `delta` field of a stream chunk."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, identity, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": identity, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the assistant's message of a whole answer; its content is null if it has calls and no text."""
    content, reasoning = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(index, identity, name):
                calls[index] = {"id": identity, "type": "function", "function": {"name": name, "arguments": ""}}
            case Arguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message
