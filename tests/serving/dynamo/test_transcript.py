"""Dynamo answers what the light server answers, field by field: texts, counts, log-probabilities, refusals."""

from __future__ import annotations

import pytest

from tests.serving.dynamo.served import Served
from tests.serving.http.in_process import InProcess
from tests.serving.transcript import REQUESTS, answer_of

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]


@pytest.fixture(scope="module")
def clients(demo_engine, chat_engine, tool_engine):
    """A client of Dynamo and one of the light server."""
    engines = {"demo": demo_engine, "chat": chat_engine, "tools": tool_engine}
    dynamo = Served(*(f"{name}={engine}" for name, engine in engines.items()), "--port", "0", "--threads", "1")
    with InProcess(engines) as light:
        yield dynamo.client(), light.client()
    assert dynamo.end() == 0


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_request_has_the_light_servers_answer(clients, kind):
    dynamo, light = (answer_of(client, *REQUESTS[kind]) for client in clients)
    assert dynamo == light
    assert "/tmp/" not in str(dynamo), "no path of this machine"
    assert dynamo[0] < 500


def test_the_requests_ask_for_what_they_say(clients):
    """Otherwise equal answers would say little."""
    _, light = clients
    asked = ("a tool by its name", "one call alone", "a choice")
    answers = {kind: answer_of(light, *REQUESTS[kind])[1][0]["choices"][0] for kind in asked}
    assert len(answers["one call alone"]["message"]["tool_calls"]) == 1
    (call,) = answers["a tool by its name"]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert answers["a tool by its name"]["finish_reason"] == "tool_calls"
    assert answers["a choice"]["logprobs"]["content"]
