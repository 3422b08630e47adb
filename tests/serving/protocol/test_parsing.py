"""A body becomes one request object, or an error that names the field that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvc_trt import Sampling
from kvc_trt.runtime import Request
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.serving.protocol.body import json_object
from kvc_trt.serving.protocol.errors import ApiError
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.request import MOST_ANSWERS, ApiRequest, parse

MESSAGES = [{"role": "user", "content": "?"}]


def chat(**given: object) -> ApiRequest:
    return parse({"model": "m", "messages": MESSAGES, **given}, Endpoint.CHAT)


def completion(prompt: object = "lamp", **given: object) -> ApiRequest:
    return parse({"model": "m", "prompt": prompt, **given}, Endpoint.COMPLETIONS)


def test_a_chat_request_is_parsed_whole() -> None:
    asked = chat(stream=True, stream_options={"include_usage": True}, chat_template_kwargs={"thinking": False}, n=2)
    assert asked == ApiRequest(
        Endpoint.CHAT,
        "m",
        messages=MESSAGES,
        template_variables={"thinking": False},
        n=2,
        stream=True,
        include_usage=True,
    )


def test_rules_reach_the_request_by_openais_names() -> None:
    given = {
        "max_tokens": 5, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 4,
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["a"],
        "stop_token_ids": [7, 8], "bad_words": ["b"], "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    expected = Request(
        (),
        max_new_tokens=5,
        sampling=Sampling(0.7, 3, 0.9, 4, 1.2, 0.5, -0.5, 0.1),
        stop_strings=("a",),
        stop_token_ids=(7, 8),
        bad_words=("b",),
        min_tokens=2,
        ignore_eos=True,
    )
    assert chat(**given).rules == completion(**given).rules == expected


def test_both_names_of_max_new_tokens_are_read() -> None:
    assert chat(max_completion_tokens=3).rules.max_new_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).rules.max_new_tokens == 3
    assert chat().rules.max_new_tokens is None


def test_logprobs_of_both_endpoints_become_one_rule() -> None:
    assert chat().rules.logprobs is None
    assert chat(logprobs=False).rules.logprobs is None
    assert chat(logprobs=True).rules.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).rules.logprobs == 20
    assert completion(logprobs=0).rules.logprobs == 0
    assert completion(logprobs=3).rules.logprobs == 3


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("lamp", ("lamp",)),
        ([3, 4], ((3, 4),)),
        (["a", "b"], ("a", "b")),
        ([[3, 4], [5]], ((3, 4), (5,))),
        (["a", [5]], ("a", (5,))),
    ],
)
def test_a_prompt_may_be_text_token_ids_or_a_list_of_both(prompt: object, prompts: tuple[object, ...]) -> None:
    assert completion(prompt).prompts == prompts


def test_answers_to_one_prompt_have_seeds_of_their_own() -> None:
    asked = chat(n=3, temperature=1, seed=2**64 - 1)
    assert [asked.of_answer((5,), index).sampling.seed for index in range(3)] == [2**64 - 1, 0, 1]
    assert asked.of_answer((5,), 1).prompt_token_ids == (5,)
    assert chat(n=2).of_answer((5,), 1).sampling.seed is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = Grammar.json_schema(SCHEMA)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, OF_SCHEMA),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar.json_object()),
        ({"structured_outputs": {}}, None),
    ],
)
def test_every_spelling_of_a_grammar_is_parsed(given: dict[str, Any], grammar: Grammar | None) -> None:
    assert chat(**given).rules.grammar == completion(**given).rules.grammar == grammar


def test_biases_have_token_ids_for_names() -> None:
    assert chat(logit_bias={"5": -100, "7": 1.5}).rules.logit_bias == {5: -100.0, 7: 1.5}


def test_neutral_values_change_no_request() -> None:
    assert chat(store=False, user="u", metadata={"a": "b"}, n=1, response_format={"type": "text"}) == chat()
    assert completion(best_of=1, suffix="", echo=False, top_k=-1, stop=None) == completion()


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "model is missing"),
    ({"model": 5}, "model", "model is 5, expected a text"),
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": "hello"}, "messages", "messages is 'hello', expected a list"),
    ({"n": 0}, "n", "n is 0, with 1 prompts: expected 1 to 128 answers in all"),
    ({"n": 2.0}, "n", "n is 2.0, expected an integer"),
    ({"stream": "true"}, "stream", "stream is 'true', expected true or false"),
    ({"stream_options": {}}, "stream_options", "stream_options: expected beside stream true"),
    ({"stream": True, "stream_options": 3}, "stream_options", "stream_options is 3, expected a JSON object"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "'include_obfuscation'"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "include_usage is 1, expected true"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, found 0"),
    ({"max_tokens": True}, "max_tokens", "max_tokens is True, expected an integer"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1, found 0"),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens", "give one of them"),
    ({"temperature": -1}, "temperature", "temperature must be a finite number >= 0, found -1"),
    ({"top_p": 0}, "top_p", r"top_p must be in (0, 1], found 0"),
    ({"seed": -1}, "seed", "seed is -1, expected an integer from 0 to 2^64 - 1"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "stop: expected up to 4 texts, found 5 texts"),
    ({"stop": [""]}, "stop", "stop: expected up to 4 texts, found an empty text"),
    ({"stop": 5}, "stop", "stop is 5, expected texts"),
    ({"min_tokens": 4, "max_tokens": 2}, "min_tokens", "min_tokens is 4, expected at most max_tokens, which is 2"),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs: expected beside logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be from 0 to 20, found 21"),
    ({"logprobs": 3}, "logprobs", "logprobs is 3, expected true or false"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "chat_template_kwargs is [], expected a JSON object"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
    ({"logit_bias": {"lamp": 1}}, "logit_bias", "'lamp'"),
    ({"logit_bias": [5]}, "logit_bias", "logit_bias is [5], expected numbers by token id"),
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        "type is 'xml', expected text, json_object or json_schema",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is None, expected a JSON object"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice are given"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unknown field 'regexp'; did you mean 'regex'?"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "2 kinds are given"),
    ({"guided_choice": []}, "guided_choice", "guided_choice: the list of choices is empty"),
    ({"return_kv_proof": "all"}, "return_kv_proof", "return_kv_proof is 'all', expected digest or lists"),
]


@pytest.mark.parametrize(
    ("given", "field", "message"), BAD, ids=[f"{field}-{number}" for number, (_, field, _) in enumerate(BAD)]
)
def test_a_wrong_value_is_refused_by_its_name(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**given)
    assert (raised.value.status, raised.value.param) == (400, field)
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt 1 is empty"),
        ({"prompt": {"text": "?"}}, "prompt is {'text': '?'}, expected text or token ids"),
        ({"prompt": [["a"], 3]}, "prompt 1 is 3, expected text or token ids"),
        ({"prompt": "\ud800"}, "prompt is not valid Unicode"),
        ({"prompt": ["a"] * (MOST_ANSWERS + 1)}, "129 prompts, expected at most 128"),
        ({"prompt": ["a"] * 64, "n": 3}, "n is 3, with 64 prompts"),
        ({"echo": True, "logprobs": 1}, "echo goes without logprobs"),
        ({"logprobs": True}, "logprobs is True, expected an integer"),
        ({"best_of": 3}, "best_of is not supported, found 3: ask for n answers, and choose"),
    ],
)
def test_a_wrong_completion_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse({"model": "m", "prompt": "lamp", **given}, Endpoint.COMPLETIONS)
    assert raised.value.status == 400
    assert message in raised.value.message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"3", b"null", b'{"a": "\xff"}', b'{"a": NaN}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=lambda content: content[:12].decode(errors="replace"),
)
def test_a_body_is_a_json_object(content: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        json_object(content)
    assert raised.value.status == 400
