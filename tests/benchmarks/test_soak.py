"""A soak in small: a scheduler for some seconds, the clients' own judgement, and the page that follows from results."""

from __future__ import annotations

import json
import random
import subprocess

import pytest

from benchmarks import store
from benchmarks.soak import catalogue, page
from benchmarks.soak.clients import Answer, Client, ask, same
from benchmarks.soak.in_process import ROWS, soak
from benchmarks.soak.memory import by_minute, growth
from benchmarks.soak.outcomes import BROKEN, DIFFERENT, EQUAL, LOST, UNEXPLAINED, Outcomes
from tests.serving.dynamo.served import PYTHON, ROOT, require_environment


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from kvc_trt.cli.main import run

    path = tmp_path_factory.mktemp("soak") / "engine"
    assert run(["build", *catalogue.TURNS.arguments(), "--no-verify", "-o", str(path)]) == 0
    return path


@pytest.mark.slow
def test_a_scheduler_survives_its_callers(engine):
    """Conversations, contexts, drafts, deadlines, cancelled and hostile requests, for three seconds."""
    found = soak(engine, 3.0, 1, distinct=7)
    assert (found["wrong"], found["examples"]) == (0, [])
    assert {"alone", "conversation", "context", "cancelled", "hostile"} <= set(found["requests"])
    assert found["requests"]["hostile"]["refused"] > 0
    assert (found["rows_free"], found["without_an_end"], found["thread_lives"]) == (ROWS, 0, True)


def test_an_error_needs_a_kill_that_explains_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("benchmarks.soak.outcomes.time.monotonic", lambda: now[0])
    outcomes = Outcomes()
    assert outcomes.of_error(99.0) == UNEXPLAINED
    now[0] = 110.0
    outcomes.down()
    now[0] = 111.0
    assert outcomes.of_error(105.0) == BROKEN
    outcomes.up()
    now[0] = 130.0
    assert outcomes.of_error(105.0) == BROKEN, "it began before"
    assert outcomes.of_error(113.0) == BROKEN, "connections from before may still break"
    assert outcomes.of_error(116.0) == UNEXPLAINED


def test_the_first_20_bad_outcomes_are_kept_as_examples():
    outcomes = Outcomes()
    outcomes.note("a", EQUAL, "fine")
    for number in range(50):
        outcomes.note("a", DIFFERENT, "x" * 5000 + str(number))
    assert outcomes.total(DIFFERENT, LOST) == 50
    assert len(outcomes.examples) == 20
    assert all(len(one["what"]) == 600 for one in outcomes.examples)


def test_answers_are_the_same_but_for_rounding():
    one = Answer(200, "a", "stop", 3, (-0.5,))
    assert same(one, Answer(200, "a", "stop", 3, (-0.501,)))
    for other in (
        Answer(200, "b", "stop", 3, (-0.5,)), Answer(200, "a", "length", 3, (-0.5,)),
        Answer(200, "a", "stop", 4, (-0.5,)), Answer(200, "a", "stop", 3, (-0.6,)), Answer(200, "a", "stop", 3),
    ):  # fmt: skip
        assert not same(one, other)


def event(text, **more):
    return b"data: " + json.dumps({"choices": [{"text": text, **more}]}).encode() + b"\n\n"


STREAM = event("a") + event("b", finish_reason="stop")


@pytest.mark.parametrize(
    ("status", "content", "expected"),
    [
        (200, STREAM + b"data: [DONE]\n\n", EQUAL),
        (200, STREAM, LOST),
        (200, event("x", finish_reason="stop") + b"data: [DONE]\n\n", DIFFERENT),
        (200, event("a") + b'data: {"error": {"message": "the frontend does not answer"}}\n\n', UNEXPLAINED),
        (503, b'{"error": {"message": "busy: 16 requests wait"}}', "busy"),
        (503, b'{"error": {"message": "the frontend does not answer"}}', UNEXPLAINED),
        (200, b"", LOST),
        (500, b"Internal", LOST),
    ],
)
def test_each_ending_of_a_stream_counts_as_its_outcome(monkeypatch, status, content, expected):
    asked, outcomes = catalogue.Asked("a", catalogue.COMPLETIONS, {"model": catalogue.TINY}), Outcomes()
    monkeypatch.setattr("benchmarks.soak.clients.send", lambda *_: (status, content))
    client = Client(0, [(asked, Answer(200, "ab", "stop"))], outcomes, 0, may_ask=None, pause_seconds=1.0)
    client._draw.random = lambda: 0.0  # a stream
    client._ask()
    assert outcomes.total(expected) == 1


def test_an_answer_without_a_stream_is_parsed(monkeypatch):
    body = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    monkeypatch.setattr("benchmarks.soak.clients.send", lambda *_: (200, json.dumps(body).encode()))
    asked = catalogue.Asked("chat", catalogue.CHATS, {"model": catalogue.CHAT})
    assert ask(0, asked, stream=False) == Answer(200, "hello", "stop", 2)


def test_a_leak_has_a_slope_and_noise_has_none():
    draw = random.Random(0)
    samples = [(5.0 * step, 100 + step / 12 + draw.gauss(0, 0.5)) for step in range(360)]  # a MiB each minute
    leak = growth(by_minute(samples))
    assert leak["low"] < 60 < leak["high"]
    assert leak["low"] > 50
    noise = growth(by_minute([(5.0 * step, 100 + draw.gauss(0, 0.5)) for step in range(360)]))
    assert noise["low"] < 0 < noise["high"]


def test_equal_seeds_make_equal_requests():
    assert catalogue.requests(3) == catalogue.requests(3) != catalogue.requests(4)
    assert {one.body["model"] for one in catalogue.requests(3)} == {catalogue.TINY, catalogue.CHAT}


def test_the_page_is_that_of_its_results():
    results = (store.recorded(name, "make soak") for name in (page.SERVER, page.IN_PROCESS, page.GATEWAY))
    assert page.MARKS.inside(page.PAGE) == page.text(*results)


@pytest.mark.dynamo
@pytest.mark.slow
def test_a_gateway_alone_answers_every_kind_of_request_and_keeps_nothing_of_them():
    require_environment()
    script = "import json; from benchmarks.soak.gateway import measure; print(json.dumps(measure(0.1, 0)))"
    told = subprocess.run([PYTHON, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert told.returncode == 0, told.stderr[-3000:]
    found = json.loads(told.stdout)
    kinds = {"client that leaves", "document", "long prompt", "malformed", "refused", "stream"}
    assert found["requests"].keys() <= kinds, "a status or an error that no kind should have"
    middle, last = found["looks"][len(found["looks"]) // 2], found["looks"][-1]
    kept = (last["in_use_mib"] - middle["in_use_mib"]) * 2**20
    assert kept < 300 * (last["requests"] - middle["requests"]) + 2**20
