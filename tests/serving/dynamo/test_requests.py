"""A message of Dynamo's frontend becomes a request, or an error that names the mistake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime import Sampling
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.serving.dynamo.requests import prompt_of, request_of

LIMITS = Limits(
    vocab_size=50, max_input_len=32, max_output_len=8, max_sequence_len=40, capacities=(40,), prompt_block=1
)
UNSET = {
    "stop_conditions": {"max_tokens": None, "stop": None, "min_tokens": None, "max_thinking_tokens": None},
    "sampling_options": {"n": None, "temperature": None, "top_k": None, "guided_decoding": None, "seed": None},
    "output_options": {"logprobs": None, "prompt_logprobs": None, "skip_special_tokens": None},
    "eos_token_ids": [2],
    "annotations": ["of somebody else"],
    "extra_args": {"nvext": {}},
}


def asked(**groups):
    return {"token_ids": [3, 4], **{name: {**UNSET[name], **values} for name, values in groups.items()}}


def test_unset_fields_are_left_to_the_engine():
    request = request_of({"token_ids": [3, 4], **UNSET}, LIMITS)
    assert request.prompt_token_ids == [3, 4]
    assert request.max_new_tokens is None
    assert request.sampling == Sampling()
    assert (request.stop_token_ids, request.ignore_eos, request.logprobs, request.min_tokens) == ((), False, None, 0)


def test_set_fields_reach_the_request():
    request = request_of(
        asked(
            stop_conditions={"max_tokens": 5, "stop_token_ids": [7], "stop_token_ids_hidden": [2], "ignore_eos": True},
            sampling_options={"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3, "n": 1},
            output_options={"logprobs": 2},
        ),
        LIMITS,
    )
    assert (request.max_new_tokens, request.stop_token_ids, request.ignore_eos) == (5, (7, 2), True)
    assert request.sampling == Sampling(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=3)
    assert request.logprobs == 2


def test_penalties_reach_the_request_and_neutral_ones_change_nothing():
    given_ = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0, "top_k": -1}
    request = request_of(asked(sampling_options=given_), LIMITS)
    assert request.sampling == Sampling(repetition_penalty=1.2, presence_penalty=0.5)


@pytest.mark.parametrize(
    ("group", "value", "named"),
    [
        ("sampling_options", {"n": 2}, "n of sampling_options"),
        ("sampling_options", {"guided_decoding": {"regex": "a", "json": {}}}, "guided_decoding has regex, json"),
        ("sampling_options", {"guided_decoding": {"structural_tag": "a"}}, "guided_decoding has structural_tag"),
        ("sampling_options", {"use_beam_search": True}, "use_beam_search"),
        ("sampling_options", {"new_in_the_next_version": 1}, "new_in_the_next_version"),
        ("sampling_options", {"temperature": "hot"}, "temperature"),
        ("sampling_options", {"temperature": -1}, "temperature"),
        ("sampling_options", {"seed": 1.5}, "seed"),
        ("stop_conditions", {"max_tokens": 0}, "max_tokens is 0"),
        ("stop_conditions", {"max_tokens": 39}, "expected 1 to 38"),
        ("stop_conditions", {"max_tokens": True}, "max_tokens"),
        ("stop_conditions", {"max_thinking_tokens": 5}, "max_thinking_tokens"),
        ("stop_conditions", {"stop_token_ids": ["x"]}, "stop_token_ids"),
        ("stop_conditions", {"stop_token_ids": 5}, "stop_token_ids is 5, expected a list of token ids"),
        ("stop_conditions", {"stop_token_ids_hidden": [2**40]}, "stop_token_ids_hidden is 1099511627776"),
        ("stop_conditions", {"ignore_eos": "yes"}, "ignore_eos is 'yes', expected true or false"),
        ("sampling_options", {"temperature": float("nan")}, "temperature is nan"),
        ("sampling_options", {"top_k": True}, "top_k is True"),
        ("sampling_options", {"seed": 2**70}, "seed is"),
        ("output_options", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("output_options", {"logprobs": "many"}, "logprobs"),
    ],
)
def test_wrong_and_unsupported_fields_are_named(group, value, named):
    with pytest.raises(InputError, match=named):
        request_of(asked(**{group: value}), LIMITS)


@pytest.mark.parametrize(
    ("guided", "grammar"),
    [
        ({"json": {"type": "object"}, "backend": None}, Grammar.json_schema({"type": "object"})),
        ({"regex": "a+", "backend": "any"}, Grammar.regex("a+")),
        ({"choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"grammar": "start: /a/"}, Grammar.lark("start: /a/")),
        ({"json": None}, None),
    ],
)
def test_grammars_of_the_frontend_are_ours(guided, grammar):
    assert request_of(asked(sampling_options={"guided_decoding": guided}), LIMITS).grammar == grammar


@pytest.mark.parametrize(("field", "value"), [("token_ids", 5), ("token_ids", "ab")])
def test_fields_that_must_be_a_list_are_refused_otherwise(field, value):
    with pytest.raises(InputError, match=f"{field} is .*, expected a list"):
        request_of({**asked(), field: value}, LIMITS)


def test_images_are_refused():
    with pytest.raises(InputError, match="reads text alone"):
        request_of({"token_ids": [3], "multi_modal_data": {"image_url": ["x"]}}, LIMITS)


@given(st.lists(st.integers(0, 49)), st.lists(st.integers(0, 49), max_size=3))
def test_start_tokens_stand_once_in_front(tokens, start):
    once = prompt_of({"token_ids": tokens}, start)
    assert once[: len(start)] == start
    assert once in (tokens, [*start, *tokens])
    assert prompt_of({"token_ids": once}, start) == once
