"""Bodies of OpenAI's API through tensors: the answers of the light server, in a real tritonserver."""

from __future__ import annotations

import json

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.serving.triton.repository import export_model
from tests.serving.http.in_process import InProcess
from tests.serving.transcript import REQUESTS, answer_of, comparable
from tests.serving.triton.server import check_environment, serving, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

NOT_HERE = {
    "a model that is not there": "the path names the model",
    "a field of the other endpoint": "a body with messages is a chat",
    "a chat with a model that chats not": "each model is alone, so a name of another one is unknown",
}
"""Requests whose answers have to differ."""


@pytest.fixture(scope="module")
def engines(demo_engine, chat_engine, tool_engine):
    return {"demo": demo_engine, "chat": chat_engine, "tools": tool_engine}


@pytest.fixture(scope="module")
def triton(engines, tmp_path_factory):
    check_environment()
    directory = tmp_path_factory.mktemp("openai")
    for name, engine in engines.items():
        export_model(open_engine(engine), directory / "repository", name)
    with serving(directory / "repository", directory) as server:
        yield server


@pytest.fixture(scope="module")
def light(engines):
    with InProcess(engines) as server:
        yield server.client()


def through_tensors(server, body):
    """Status and documents, as `answer_of` returns them from HTTP."""
    given = {"openai_request": json.dumps(body)}
    if not body.get("stream"):
        reply = server.generate(body["model"], **given)
        assert reply.status == 200, reply
        return reply.body["openai_status"], comparable([json.loads(reply.body["openai_response"])])
    events = server.stream(body["model"], **given)
    return events[-1]["openai_status"], comparable([json.loads(event["openai_response"]) for event in events])


@pytest.mark.parametrize("kind", [kind for kind in REQUESTS if kind not in NOT_HERE])
def test_every_request_has_the_light_servers_answer(triton, light, kind):
    path, body = REQUESTS[kind]
    status, documents = answer_of(light, path, body)
    expected = status, [one for one in documents if one != "[DONE]"]
    assert rounded(through_tensors(triton, body)) == rounded(expected)


def rounded(found):
    """Return the same without the last digits of log-probabilities, in which versions of NumPy differ."""
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [rounded(one) for one in found]
    return round(found, 5) if isinstance(found, float) else found


def test_an_openai_body_beside_other_fields_is_refused(triton):
    for more in ({"text_input": "lamp"}, {"max_tokens": 3}, {"unknown": "x"}):
        body = triton.generate("demo", openai_request="{}", **more).body
        assert body["openai_status"] == 400
        assert "openai_request goes alone" in body["openai_response"]


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 50_000])
def test_malformed_openai_bodies_are_refused(triton, content):
    body = triton.generate("demo", openai_request=content).body
    assert body["openai_status"] == 400
    assert json.loads(body["openai_response"])["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_ends_its_answer(triton):
    body = {"model": "demo", "prompt": "lamp", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with triton.open_stream("demo", openai_request=json.dumps(body)) as response:
        response.readline()
    wait_until(lambda: triton.metric("kvc_trt_ended_total", model="demo", kind="cancelled") == 1)
