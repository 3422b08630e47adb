"""Requests by the names of the outside world: the fields that are read, and one clear error for each mistake."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime.request import Request, Sampling
from kvc_trt.serving.fields import FIELDS, OTHER_NAMES, SAMPLING_FIELDS
from kvc_trt.serving.request import ServedRequest, parse_request


def test_a_text_alone_is_greedy_and_whole():
    assert parse_request({"text_input": "hä".encode()}) == ServedRequest(text="hä")


def test_every_rule_reaches_its_field():
    asked = parse_request(
        {
            "input_ids": [3, 4], "max_tokens": 7, "stream": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9,
            "min_p": 0.1, "seed": 2**64 - 1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
            "frequency_penalty": -0.5, "min_tokens": 2, "stop_words": [b"a", "b"], "bad_words": "c",
            "stop_token_ids": [9], "ignore_eos": True, "return_log_probs": True, "return_finish_reason": True,
            "return_num_input_tokens": False,
        }
    )  # fmt: skip
    sampling = Sampling(0.7, 5, 0.9, 2**64 - 1, 1.1, 0.5, -0.5, 0.1)
    assert asked.rules == Request(
        (), 7, sampling=sampling, stop_token_ids=(9,), stop_strings=("a", "b"), min_tokens=2, bad_words=("c",),
        logprobs=0, ignore_eos=True,
    )  # fmt: skip
    assert (asked.token_ids, asked.stream, asked.returns) == ((3, 4), True, {"log_probs", "finish_reason"})


def test_fields_that_ask_for_nothing_are_accepted():
    """The requests are those of TensorRT-LLM's launch examples and of vLLM."""
    asked = parse_request({"text_input": "x", "bad_words": "", "stop_words": [""], "beam_width": 1, "top_k": -1})
    assert asked == ServedRequest(text="x")
    assert parse_request({"text_input": "x", "sampling_parameters": '{"n": 1, "seed": null}'}) == asked


def test_sampling_parameters_equal_the_fields_of_a_request():
    """Includes numbers as text, as vLLM's own client sends them."""
    given_as = {"temperature": "0.7", "max_tokens": "5", "stop": ["a"], "ignore_eos": "True"}
    there = parse_request({"text_input": "x", "sampling_parameters": json.dumps(given_as)})
    fields = {"temperature": 0.7, "max_tokens": 5, "stop_words": ["a"], "ignore_eos": True}
    assert there == parse_request({"text_input": "x", **fields})


def test_the_prompt_is_echoed_only_when_asked_for():
    assert parse_request({"text_input": "x", "exclude_input_in_output": False}).echo
    assert not parse_request({"text_input": "x", "exclude_input_in_output": True}).echo
    with pytest.raises(InputError, match="input_ids have no text"):
        parse_request({"input_ids": [1], "exclude_input_in_output": False})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "text_input or input_ids, found neither"),
        ({"text_input": "x", "input_ids": [1]}, "text_input or input_ids, found both"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"text_input": b"ab\xff"}, "text_input is not valid UTF-8: byte 2"),
        ({"text_input": "a\ud800"}, "text_input is not valid Unicode: character 1"),
        ({"text_input": 5}, "text_input is 5, expected a text"),
        ({"max_token": 5}, "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, found 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5, expected an integer"),
        ({"max_tokens": True}, "max_tokens is True, expected an integer"),
        ({"max_tokens": "many"}, "max_tokens is 'many', expected an integer"),
        ({"temperature": -1}, "temperature must be a finite number >= 0"),
        ({"temperature": float("nan")}, "temperature is nan, expected a finite number"),
        ({"temperature": 10**400}, "temperature is .*, expected a number"),
        ({"top_p": 0}, "top-p must be in"),
        ({"top_k": -2}, "top-k must be >= 0"),
        ({"seed": -1}, "seed is -1, expected an integer from 0"),
        ({"seed": 2**64}, "expected an integer from 0"),
        ({"stream": 1}, "stream is 1, expected true or false"),
        ({"stop_words": [1]}, r"stop_words is 1, expected texts"),
        ({"input_ids": "12", "text_input": None}, "input_ids is '12', expected a list of token ids"),
        ({"input_ids": [1.0], "text_input": None}, "input_ids is 1.0, expected a token id"),
        ({"beam_width": 4}, "beam_width is 4, and this server only answers with 1"),
        ({"sampling_parameters": "{"}, "sampling_parameters is not valid JSON"),
        ({"sampling_parameters": "[]"}, r"sampling_parameters is \[\], expected a JSON object"),
        ({"sampling_parameters": '{"text_input": "y"}'}, "sampling_parameters: unknown parameter 'text_input'"),
        ({"sampling_parameters": '{"temprature": 1}'}, "did you mean 'temperature'?"),
        ({"sampling_parameters": '{"n": 2}'}, "n is 2, and this server only answers with 1"),
        ({"sampling_parameters": '{"stop": "a"}', "stop_words": "b"}, "stop_words is given twice"),
        ({"sampling_parameters": '{"stop": "a", "stop_words": "b"}'}, "stop_words is given twice"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused_by_name(fields, message):
    prompt = {} if {"text_input", "input_ids"} & set(fields) or not fields else {"text_input": "x"}
    with pytest.raises(InputError, match=message):
        parse_request({**prompt, **fields})


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "max_token", ""]), _VALUES, max_size=5))
def test_random_fields_are_read_or_refused_in_one_line(fields):
    try:
        assert isinstance(parse_request(fields), ServedRequest)
    except InputError as error:
        assert "\n" not in error.message  # noqa: PT017
        assert len(error.message) < 250  # noqa: PT017


@given(
    st.dictionaries(
        st.sampled_from([*SAMPLING_FIELDS]), _VALUES.filter(lambda one: not isinstance(one, bytes)), max_size=3
    )
)
def test_random_sampling_parameters_are_read_or_refused_in_one_line(fields):
    try:
        text = json.dumps(fields)
    except TypeError:
        return
    try:
        parse_request({"text_input": "x", "sampling_parameters": text})
    except InputError as error:
        assert "\n" not in error.message  # noqa: PT017


def test_every_alias_stands_for_a_known_field():
    assert set(OTHER_NAMES) <= set(SAMPLING_FIELDS)
    assert set(OTHER_NAMES.values()) <= set(FIELDS)
