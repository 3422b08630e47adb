"""The fields of requests and answers that the gateway reads."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.serving.dynamo.bodies import (
    WANTS_ERRORS,
    WANTS_PROOF,
    checked_body,
    error_of_answer,
    error_of_status,
    error_of_stream,
)
from kvc_trt.serving.dynamo.chunks import refusal

REFUSED = {"choices": [], "nvext": {"engine_data": refusal(400, "no room")["engine_data"]}}
PIECE = {"choices": [{"text": "a"}]}


def events(*documents):
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in documents) + b"data: [DONE]\n\n"


def test_a_request_asks_for_reasons_beside_what_it_asks_for_itself():
    body = {"model": "m", "prompt": "p", "nvext": {"extra_fields": ["timing"], "greed_sampling": True}}
    checked = checked_body(json.dumps(body).encode())
    assert checked["nvext"] == {
        "extra_fields": ["timing", "engine_data"],
        "greed_sampling": True,
        "annotations": [WANTS_ERRORS],
    }
    assert checked_body(json.dumps(checked).encode()) == checked


def test_of_several_prompts_none_speaks_for_the_others():
    checked = checked_body(b'{"prompt": ["a", "b"]}')
    assert "annotations" not in checked["nvext"]
    assert checked_body(b'{"prompt": [1, 2]}')["nvext"]["annotations"] == [WANTS_ERRORS]


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_requests_for_a_proof_travel_as_annotations(kind):
    checked = checked_body(json.dumps({"prompt": "p", "return_kv_proof": kind}).encode())
    assert checked["nvext"]["annotations"] == [WANTS_ERRORS, f"{WANTS_PROOF}{kind}"]
    assert "return_kv_proof" not in checked, "the frontend refuses fields that it does not know"


@pytest.mark.parametrize("nothing", [b"null", b'""'])
def test_no_proof_is_asked_for_by_nothing(nothing):
    checked = checked_body(b'{"prompt": "p", "return_kv_proof": ' + nothing + b"}")
    assert checked == {"prompt": "p", "nvext": {"extra_fields": ["engine_data"], "annotations": [WANTS_ERRORS]}}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"prompt": "p", "return_kv_proof": "all"}', "return_kv_proof is 'all', expected digest or lists"),
        (b'{"prompt": "p", "return_kv_proof": true}', "return_kv_proof is True"),
        (b'{"prompt": ["a", "b"], "return_kv_proof": "lists"}', "several prompts"),
        (b"", "JSON"),
        (b"\xff", "UTF-8"),
        (b"[]", "object"),
        (b"[" * 100_000, "JSON"),
        (b'{"echo": true}', "echo"),
        (b'{"logit_bias": {"1": 2}}', "logit_bias"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"messages": null}', "messages: expected a list"),
        (b'{"messages": [], "top_logprobs": 2}', "top_logprobs: expected beside logprobs"),
        (b'{"messages": [], "top_logprobs": 2, "logprobs": false}', "top_logprobs"),
        (b'{"nvext": []}', "nvext"),
        (b'{"nvext": {"annotations": "x"}}', "annotations"),
    ],
)
def test_fields_that_cannot_be_passed_on_are_named(content, named):
    with pytest.raises(InputError, match=named):
        checked_body(content)


def test_fields_that_ask_for_nothing_pass():
    checked_body(b'{"echo": false, "best_of": 1, "suffix": "", "logit_bias": {}, "n": null}')


def test_a_refusal_inside_an_answer_is_found():
    assert error_of_answer(json.dumps(REFUSED).encode()) == (400, "no room")
    assert error_of_answer(json.dumps(PIECE).encode()) is None
    assert error_of_answer(b"not JSON") is None


def test_reasons_of_the_client_are_told_and_no_others():
    assert error_of_status(400, b'{"message": "Prompt is empty"}') == (400, "Prompt is empty")
    assert error_of_status(503, b'{"error": {"message": "busy"}}') == (503, "busy")
    assert error_of_status(500, b'{"message": "panic at /root/secret"}') == (500, "the server failed at this request")
    assert "no such model" in error_of_status(404, b"")[1]


@given(st.integers(0, 200))
def test_a_stream_that_begins_with_an_error_is_one_wherever_it_is_cut(cut):
    for document, expected in (
        (REFUSED, (400, "no room")),
        ({"error": {"message": "?", "code": 500}}, (500, "the server failed at this request")),
        (PIECE, False),
    ):
        whole = b": a comment\n\n" + events(document, PIECE)
        first = len(whole) - len(events(PIECE))
        found = error_of_stream(whole[:cut])
        assert found == (expected if cut >= first else None)
        assert error_of_stream(whole, ended=True) == expected


def test_an_empty_stream_is_no_error_of_ours():
    assert error_of_stream(b"") is None
    assert error_of_stream(b"", ended=True) is False
