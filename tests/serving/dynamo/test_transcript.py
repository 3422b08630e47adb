"""Dynamo answers what the light server answers, field by field: texts, counts, log-probabilities, refusals."""

from __future__ import annotations

import pytest

from tests.serving.dynamo.served import Served
from tests.serving.http.in_process import InProcess
from tests.serving.transcript import REQUESTS, answer_of

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]


@pytest.fixture(scope="module")
def clients(demo_engine, chat_engine):
    """A client of Dynamo and one of the light server."""
    engines = {"demo": demo_engine, "chat": chat_engine}
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
