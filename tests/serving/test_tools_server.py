"""Tools over HTTP, with OpenAI's own client: calls that are forced, streamed, answered, and refused."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest

from kvc_trt.runtime import Grammar
from kvc_trt.serving.engine import ServedEngine

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "now": {"type": "boolean"}},
            "required": ["city", "now"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Paris", "Rome"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
QUESTION = [{"role": "user", "content": "Weather?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def client(tool_engine):
    from openai import OpenAI

    from tests.serving.http.in_process import InProcess

    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    with (
        InProcess({"model": tool_engine}) as server,
        OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, messages=QUESTION, **more):
    return client.chat.completions.create(**{"model": "model", "messages": messages, "max_tokens": 300, **more})


def arguments_of(call):
    found = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert found.keys() == {"city", "now"}
        assert found["city"] in ("Paris", "Rome")
        assert isinstance(found["now"], bool)
    else:
        assert (call.function.name, found) == ("clock", {})
    return found


def test_a_tool_loop_of_two_requests_is_answered(client):
    """The second request has the answer as the client holds it, with null content, and the tool's result."""
    answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments_of(call)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
    second = ask(client, [*QUESTION, answer.message, result], tools=TOOLS, max_tokens=5)
    assert second.choices[0].message.role == "assistant"
    assert second.usage.prompt_tokens > ask(client, tools=TOOLS, max_tokens=5).usage.prompt_tokens + len(
        call.function.name
    )


def test_a_loop_goes_on_after_a_call_that_was_cut(client):
    """The client sends back what it got: a call whose arguments are no JSON."""
    whole = ask(client, tools=TOOLS, tool_choice=NAMED)
    answer = ask(client, tools=TOOLS, tool_choice=NAMED, max_tokens=whole.usage.completion_tokens - 20).choices[0]
    assert answer.finish_reason == "length"
    (call,) = answer.message.tool_calls
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "the arguments are no JSON: call again"}
    for tools in (TOOLS, []):
        again = ask(client, [*QUESTION, answer.message, result], tools=tools, max_tokens=5)
        assert again.choices[0].message.role == "assistant"


def test_several_calls_have_ids_of_their_own(client):
    answer = ask(client, tools=TOOLS, tool_choice="required", temperature=1, seed=3).choices[0]
    calls = answer.message.tool_calls
    assert len({call.id for call in calls}) == len(calls) >= 1
    for call in calls[: len(calls) if answer.finish_reason == "tool_calls" else -1]:
        arguments_of(call)


def test_a_named_tool_is_called_once(client):
    answer = ask(client, tools=TOOLS, tool_choice=NAMED).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    arguments_of(call)


@pytest.mark.parametrize("more", [{"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": "auto"}])
def test_a_stream_says_the_same(client, more):
    options = {"tools": TOOLS, "temperature": 1, "seed": 7, "n": 2, **more}
    whole = ask(client, **options)
    said: dict[int, dict] = {}
    for chunk in ask(client, stream=True, **options):
        for part in chunk.choices:
            found = said.setdefault(part.index, {"content": "", "calls": {}, "end": None})
            found["content"] += part.delta.content or ""
            found["end"] = part.finish_reason or found["end"]
            for piece in part.delta.tool_calls or []:
                if piece.id is not None:
                    assert piece.index == len(found["calls"])
                    found["calls"][piece.index] = [piece.function.name, ""]
                found["calls"][piece.index][1] += piece.function.arguments
    for choice in whole.choices:
        found = said[choice.index]
        assert found["content"] == (choice.message.content or "")
        assert found["end"] == choice.finish_reason
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
        assert list(found["calls"].values()) == calls


def test_tool_choice_none_leaves_the_tools_out_of_the_prompt(client):
    plain, none, auto = (
        ask(client, max_tokens=3, **more) for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
    )
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens < auto.usage.prompt_tokens
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert plain.choices[0].message.tool_calls is None


def test_thoughts_are_separate_from_content(client):
    """The template opens them, so all of an answer that is cut are thoughts; a grammar lets them come first."""
    cut = ask(client, max_tokens=40, extra_body=THINKING).choices[0].message
    assert cut.content == ""
    assert cut.reasoning_content
    answer = ask(client, tools=[CLOCK], tool_choice="required", max_tokens=40, extra_body=THINKING).choices[0]
    assert answer.message.reasoning_content
    assert answer.finish_reason == "length"


def test_a_format_and_tools_allow_either(client):
    """Either a call or the format: both are allowed at the first token."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    seen = set()
    for seed in range(12):
        answer = ask(client, tools=[CLOCK], response_format=form, temperature=2, seed=seed, parallel_tool_calls=False)
        choice = answer.choices[0]
        if choice.finish_reason == "tool_calls":
            arguments_of(choice.message.tool_calls[0])
        elif choice.finish_reason == "stop":  # "length": it thought too long
            assert json.loads(choice.message.content).keys() == {"a"}
        seen.add(choice.finish_reason)
    assert seen >= {"stop", "tool_calls"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "tool 0 has the type 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "tool_choice is 'maybe'"),
        ({"tools": TOOLS, "parallel_tool_calls": 2}, "parallel_tool_calls", "parallel_tool_calls"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "obj"}}}],
             "tool_choice": "required"},
            None, "Invalid type: obj",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
             "tool_choice": "required"},
            "tools", "parameters of f: the JSON schema at # has the keyword 'not'",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice", "give one of them",
        ),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs", "cannot be set"),
        (
            {"messages": [*QUESTION, {"role": "tool", "tool_call_id": "a", "content": "b"}]},
            "messages", "no message before it has such a call",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "reads text alone"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client, fields, param, message):
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as raised:
        ask(client, **fields)
    assert raised.value.body["param"] == param
    assert message in raised.value.body["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_after_its_only_call(client, monkeypatch, stream):
    """A model that would go on for ever is stopped; the tokens that it writes meanwhile are no part of the answer.

    What the model writes is forced behind the server's back: an answer with a grammar of its request ends by that.
    """
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
    grammar = Grammar.regex(re.escape(call + call) + "[a-z]{1000,}")
    take = ServedEngine.take
    monkeypatch.setattr(
        ServedEngine, "take", lambda self, request, **how: take(self, replace(request, grammar=grammar), **how)
    )
    options = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 400}
    if stream:
        *chunks, last = ask(client, stream=True, stream_options={"include_usage": True}, **options)
        named = [one.function.name for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
        reason, usage = chunks[-1].choices[0].finish_reason, last.usage
    else:
        answer = ask(client, **options)
        named = [one.function.name for one in answer.choices[0].message.tool_calls]
        assert answer.choices[0].message.content is None
        reason, usage = answer.choices[0].finish_reason, answer.usage
    assert list(filter(None, named)) == ["clock"]
    assert reason == "tool_calls"
    assert usage.completion_tokens < 400
