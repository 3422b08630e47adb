"""Many clients at once: every request is answered, and with the answer that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.dynamo.served import Client, eventually
from tests.serving.http.in_process import InProcess

CLIENTS = 32


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randint(5, 200) for _ in range(draw.randint(8, 400))] for _ in range(CLIENTS)]


def whole(client: Client, body: dict[str, Any]) -> str:
    answer = client.complete("demo", **body)
    assert answer["choices"][0]["finish_reason"] == "length"
    return str(answer["choices"][0]["text"])


def streamed(client: Client, body: dict[str, Any]) -> str:
    events = list(client.stream("/v1/completions", {"model": "demo", **body}))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(event["choices"][0]["text"] for event in events)


def left(client: Client, body: dict[str, Any]) -> None:
    """Begin to read a stream, and go."""
    connection = client.open("/v1/completions", {"model": "demo", "stream": True, **body, "max_tokens": 500})
    connection.getresponse().readline()
    connection.sock.close()
    connection.close()


def check_load(demo_engine, answers, rounds: int) -> None:
    asked = [
        {"prompt": prompt, "max_tokens": 8 + place % 9, "ignore_eos": True} for place, prompt in enumerate(prompts())
    ]
    alone = [answers(body["prompt"], body["max_tokens"], ignore_eos=True).text for body in asked]
    ways: list[Callable[..., Any]] = [whole, streamed, streamed, left]
    with InProcess({"demo": demo_engine}, rows=8, queue_limit=2 * CLIENTS) as server:
        client = server.client()

        def run(place: int) -> list[object]:
            draw, wrong = random.Random(place), []
            for _ in range(rounds):
                index, way = draw.randrange(CLIENTS), draw.choice(ways)
                text = way(client, asked[index])
                if text is not None and text != alone[index]:
                    wrong.append((index, way.__name__, text, alone[index]))
            return wrong

        with ThreadPoolExecutor(CLIENTS) as threads:
            assert [one for found in threads.map(run, range(CLIENTS)) for one in found] == []
        eventually(lambda: client.metric("kvc_trt_running") + client.metric("kvc_trt_waiting") == 0)
        assert client.metric("kvc_trt_cache_bytes_in_use") == 0 < client.metric("kvc_trt_cache_bytes")


@pytest.mark.slow
def test_nothing_is_lost_with_32_clients(demo_engine, answers):
    check_load(demo_engine, answers, rounds=3)


@pytest.mark.exhaustive
def test_nothing_is_lost_with_32_clients_for_minutes(demo_engine, answers):
    check_load(demo_engine, answers, rounds=100)
