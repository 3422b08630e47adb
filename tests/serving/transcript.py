"""One list of requests of every kind, and what a server answers to it in a form that two servers can be compared by."""

from __future__ import annotations

import json
from typing import Any

from tests.readable_model import text
from tests.serving.dynamo.served import Client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RECORD = "<record> lamp scarlet tiger lagos eight <record> fork green horse cairo nine <query> lamp"
_MESSAGES = [{"role": "user", "content": text(9, 10, 11)}]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}
_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": true}'}}
_DRAWN = {"temperature": 1.5, "top_k": 40, "seed": 11, "ignore_eos": True}


def _chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "chat", "messages": _MESSAGES, "max_tokens": 6, **more}


def _completion(**more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "demo", "prompt": RECORD, "max_tokens": 12, **more}


def _tool(**more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "Is it?"}]
    return CHAT, {"model": "tools", "messages": messages, "tools": [_TOOL], "max_tokens": 60, **more}


REQUESTS = {
    "a chat": _chat(),
    "a chat in a stream": _chat(stream=True, stream_options={"include_usage": True}),
    "several drawn chats": _chat(n=3, **_DRAWN),
    "log-probabilities of a chat": _chat(logprobs=True, top_logprobs=2, ignore_eos=True),
    "a chat that stops": _chat(stop=[text(9), text(31)], ignore_eos=True, max_tokens=20),
    "a tool that may be called": _tool(),
    "a tool that must be called": _tool(tool_choice="required"),
    "a call in a stream": _tool(tool_choice="required", stream=True, stream_options={"include_usage": True}),
    "one call alone": _tool(tool_choice="required", parallel_tool_calls=False, **_DRAWN),
    "one call alone, in a stream": _tool(tool_choice="required", parallel_tool_calls=False, stream=True, **_DRAWN),
    "a word in place of a switch": _tool(parallel_tool_calls="no"),
    "a tool by its name": _tool(tool_choice={"type": "function", "function": {"name": "look"}}, n=2),
    "a tool that is not there": _tool(tool_choice={"type": "function", "function": {"name": "see"}}),
    "a tool that nothing can obey": _tool(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
        tool_choice="required",
    ),
    "a call and its result": _tool(
        messages=[
            {"role": "user", "content": "Is it?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "It is."},
        ]
    ),
    "a call that was cut, and what the tool says of it": _tool(
        messages=[
            {"role": "user", "content": "Is it?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**_CALL, "function": {"name": "look", "arguments": '{"a": tr'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "The arguments are no JSON."},
        ]
    ),
    "a call where the template takes none": _chat(
        messages=[*_MESSAGES, {"role": "tool", "tool_call_id": "c", "content": text(9)}], tools=[_TOOL]
    ),
    "a completion": _completion(),
    "a completion in a stream": _completion(stream=True),
    "the usage of a stream": _completion(stream=True, stream_options={"include_usage": True}, stop="lagos"),
    "a completion that stops": _completion(stop=["lagos", "x"]),
    "a completion with its prompt": _completion(echo=True),
    "several prompts": _completion(prompt=[RECORD, [5, 6, 7]], n=2, **_DRAWN),
    "log-probabilities": _completion(logprobs=2),
    "log-probabilities in a stream": _completion(logprobs=1, stream=True),
    "words that are not wanted": _completion(bad_words=["tiger"]),
    "a bias": _completion(logit_bias={"161": -100}),
    "penalties": _completion(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, ignore_eos=True),
    "a regular expression": _tool(tools=[], guided_regex="(yes|no), sir"),
    "a choice": _tool(tools=[], structured_outputs={"choice": ["yes", "no"]}, logprobs=True),
    "a JSON schema": _tool(
        tools=[], response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    ),
    "any JSON, cut short": _tool(tools=[], response_format={"type": "json_object"}, max_tokens=5, stream=True),
    "a grammar that is none": _tool(tools=[], guided_regex="("),
    "a grammar that is none, in a stream": _tool(tools=[], guided_grammar="start: (", stream=True),
    "a grammar for a model without one": _completion(guided_regex="a"),
    "no room for the answer": _completion(max_tokens=1_000_000),
    "a prompt that is too long": _completion(prompt=[5] * 1025),
    "no prompt": _completion(prompt=""),
    "a token that is not there": _completion(prompt=[5000]),
    "five stop texts": _completion(stop=list("abcde")),
    "an unknown field": _completion(max_token=5),
    "a field of the other endpoint": _completion(messages=_MESSAGES),
    "a refused field": _chat(store=True),
    "an image": _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    "an unknown role": _chat(messages=[{"role": "nobody", "content": "?"}]),
    "a proof where there are none": _completion(return_kv_proof="digest"),
    "a model that is not there": _completion(model="nobody"),
    "a chat with a model that chats not": _chat(model="demo"),
}
"""Paths and bodies, for `chat_engine` as chat, `demo_engine` as demo and `tool_engine` as tools."""


def answer_of(client: Client, path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """Status and documents of a server's answer, without the ids and the time that no two answers share."""
    status, answer = client.ask(path, body)
    return status, comparable(answer if isinstance(answer, str) else [answer])


def comparable(answer: Any) -> list[Any]:
    """Return the documents of an answer, or those of a stream's events, without what no two answers share."""
    if isinstance(answer, str):
        events = [event.removeprefix("data: ") for event in answer.strip().split("\n\n")]
        answer = [event if event == "[DONE]" else json.loads(event) for event in events]
    return [_without(document) for document in answer]


def _without(found: Any) -> Any:
    if isinstance(found, list):
        return [_without(one) for one in found]
    if not isinstance(found, dict):
        return found
    return {name: _without(value) for name, value in found.items() if name not in ("id", "created")}
