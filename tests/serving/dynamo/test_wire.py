"""Requests and answers pass Dynamo's frontend as JSON and come out as they went in; anything else is refused."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.proof import document_of
from kvc_trt.runtime import Event, Output, Request, Sampling
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.logprobs import TokenLogprobs
from kvc_trt.serving.dynamo import wire
from kvc_trt.serving.dynamo.remote import NotReached, RemoteEngine
from kvc_trt.serving.errors import ServingError
from tests.proof.test_record import recorded

PROMPT = (3, 4)
NUMBERS = st.floats(-2, 2, allow_nan=False)
REQUESTS = st.builds(
    Request,
    st.just(PROMPT),
    st.none() | st.integers(1, 2**31),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 5),
        top_k=st.integers(0, 100),
        seed=st.none() | st.integers(0, 2**64 - 1),
        presence_penalty=NUMBERS,
        min_p=st.floats(0, 1),
    ),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    stop_strings=st.lists(st.text(min_size=1), max_size=3),
    bad_words=st.lists(st.text(min_size=1), max_size=3),
    grammar=st.none() | st.builds(Grammar.regex, st.text(min_size=1)),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), NUMBERS, min_size=1),
    logprobs=st.none() | st.integers(0, 20),
    ignore_eos=st.booleans(),
    kv_proof=st.sampled_from([None, "digest", "lists"]),
)


def passed(request):
    """Return the message of a worker for a request of the gateway."""
    body = json.loads(json.dumps(wire.message_of(request, "demo")))
    return {"token_ids": body["prompt"], "annotations": ["of somebody else", *body["nvext"]["annotations"]]}


@given(REQUESTS)
@settings(max_examples=40)
def test_a_request_arrives_whole(request):
    message = passed(request)
    assert wire.is_ours(message)
    found = wire.request_in(message)
    assert list(found.prompt_token_ids) == list(PROMPT)
    for name in ("max_new_tokens", "sampling", "stop_strings", "bad_words", "grammar", "logit_bias", "kv_proof"):
        assert getattr(found, name) == getattr(request, name), name
    assert tuple(found.stop_token_ids) == tuple(request.stop_token_ids)
    assert (found.logprobs, found.ignore_eos) == (request.logprobs, request.ignore_eos)


@pytest.mark.parametrize(
    ("note", "named"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"max_token": 5}', "there is no rule 'max_token'"),
        ('{"max_new_tokens": "x"}', "max_new_tokens"),
        ('{"grammar": "a"}', "grammar is 'a'"),
        ('{"grammar": {"kind": "none"}}', "a grammar of kind 'none'"),
        ('{"logit_bias": {"x": 1}}', "logit_bias is"),
        ('{"logit_bias": [1]}', "logit_bias is"),
    ],
)
def test_invalid_rules_in_an_annotation_are_refused(note, named):
    with pytest.raises(InputError, match=named):
        wire.request_in({"token_ids": [3], "annotations": [f"{wire.RULES_NOTE}{note}"]})


@pytest.mark.parametrize("annotations", [None, [], ["x"], {"a": 1}, "kvc-trt.rules:{}", [5]])
def test_other_messages_are_not_ours(annotations):
    assert not wire.is_ours({"token_ids": [3], "annotations": annotations})


@pytest.mark.parametrize("kind", [None, "digest", "lists"])
def test_an_answer_arrives_whole(kind):
    proof = None if kind is None else recorded(kind)
    logprobs = (TokenLogprobs(-0.5, ((7, -0.25), (5, -0.5))), TokenLogprobs(-1.0, ()))
    output = Output(
        PROMPT, (5, 6), "a b", "stop", 4, (4, 3), 0, logprobs, kv_proof=proof, moved_bytes=9
    )  # fmt: skip
    events = [Event(0, 5, "a", None, logprobs[0]), Event(0, 6, " b", output, logprobs[1])]
    reader = wire.AnswerReader(Request(PROMPT, logprobs=2, kv_proof=kind))
    found = [reader.read(json.loads(json.dumps(wire.document_of_event(one)))) for one in events]
    assert found[0] == events[0]
    assert (found[1].token_id, found[1].text, found[1].logprobs) == (6, " b", logprobs[1])
    arrived = found[1].output
    if proof is not None:
        assert document_of(arrived.kv_proof) == document_of(proof)
    assert {**vars(arrived), "kv_proof": None} == {**vars(output), "kv_proof": None}


def test_a_refusal_is_raised():
    said = json.loads(json.dumps(wire.document_of_refusal(ServingError("busy", "later"))))
    with pytest.raises(ServingError, match="later") as raised:
        wire.AnswerReader(Request(PROMPT)).read(said)
    assert raised.value.reason == "busy"


@pytest.mark.parametrize("said", [None, {}, {"token": "5", "text": ""}, {"token": 5, "text": "", "more": 1}])
def test_a_malformed_answer_of_a_worker_is_an_error(said):
    with pytest.raises(InputError, match="a worker's answer"):
        wire.AnswerReader(Request(PROMPT)).read(said)


@pytest.mark.parametrize(
    ("error", "answers"),
    [
        (None, True),
        (ServingError("busy", "the queue is full"), True),
        (ServingError("failed", "a bug"), False),
        (NotReached("busy", "the frontend does not answer"), False),
        (NotReached("invalid", "no such model"), False),
        (asyncio.TimeoutError(), False),
    ],
)
def test_a_busy_worker_answers_and_a_frontend_without_one_does_not(monkeypatch, error, answers):
    class Begun:
        cancelled = False

        async def begin(self):
            if error is not None:
                raise error

        def cancel(self):
            self.cancelled = True

    engine, answer = RemoteEngine(None, "http://127.0.0.1:1", "model"), Begun()
    monkeypatch.setattr(engine, "take", lambda request: answer)
    assert asyncio.run(engine.answers()) is answers
    assert answer.cancelled


def test_a_priority_that_no_worker_would_read_is_refused():
    engine = RemoteEngine(None, "http://127.0.0.1:1", "model")
    engine.take(Request((5,), 1))
    with pytest.raises(ServingError, match="priority") as caught:
        engine.take(Request((5,), 1), priority=-1)
    assert caught.value.reason == "invalid"
