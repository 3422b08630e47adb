"""`kvc-trt serve` with real processes on loopback: answers and refusals, and processes that die and come back."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from kvc_trt import Sampling
from tests.readable_model import text
from tests.serving.dynamo.served import LONG, Served, eventually

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

RECORD = "<record> lamp scarlet tiger lagos eight <record> fork green horse cairo nine <query> lamp"


@pytest.fixture(scope="module")
def served(demo_engine, chat_engine):
    """Two engines under their names; the second is a chat model, and its words are characters."""
    one = Served(f"demo={demo_engine}", f"chat={chat_engine}", "--port", "0", "--threads", "1", "--queue", "8")
    yield one
    assert one.end(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def text_of(answer):
    return answer["choices"][0]["text"]


def idle(client, model="demo"):
    return client.metric("kvc_trt_running", model=model) + client.metric("kvc_trt_waiting", model=model) == 0


def test_the_deployment_says_how_to_ask(served, client):
    assert "demo, chat: ready at http://127.0.0.1" in served.until("ready at")
    assert f"curl http://127.0.0.1:{client.port}/v1/completions" in served.until('"model": "demo"')
    assert "/v1/chat/completions" in served.until('"model": "chat"')


def test_nothing_listens_beyond_this_machine(served):
    processes = [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children(recursive=True)]
    listening = [
        one.laddr.ip for process in processes for one in process.net_connections("all") if one.status == "LISTEN"
    ]
    assert len(processes) == 4
    assert len(listening) >= 4
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_every_model_is_listed(client):
    status, models = client.ask("/v1/models")
    assert status == 200
    assert {model["id"]: model["max_model_len"] for model in models["data"]} == {"demo": 9216, "chat": 288}
    assert client.ask("/v1/models/demo")[1]["max_prompt_len"] == 1024


def test_a_completion_is_the_answer_of_the_engine_alone(client, answers):
    answer, alone = client.complete("demo", RECORD, max_tokens=8), answers(RECORD, 8)
    assert text_of(answer).strip() == alone.text
    assert answer["choices"][0]["finish_reason"] == alone.finish_reason == "stop"
    assert answer["usage"]["prompt_tokens"] == len(alone.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == len(alone.token_ids)


def test_a_compacted_prompt_says_what_it_kept(client, answers, needle):
    answer, alone = client.complete("demo", needle, max_tokens=8), answers(needle, 8)
    assert text_of(answer).strip() == alone.text
    found = answer["choices"][0]["kvc"]
    kept = sum(alone.physical_lengths) / len(alone.physical_lengths)
    assert found == {"logical_tokens": alone.logical_length, "kept_tokens_per_cache": round(kept, 1)}
    assert kept < alone.logical_length


def test_a_stream_says_the_same_piece_by_piece(client, answers, needle):
    body = {"model": "demo", "prompt": needle, "max_tokens": 12, "ignore_eos": True}
    events = list(client.stream("/v1/completions", body))
    alone = answers(needle, 12, ignore_eos=True)
    assert len(events) > 5  # one for every token that is text
    assert "".join(event["choices"][0]["text"] for event in events).strip() == alone.text
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]


def test_seeds_draw_the_tokens_that_the_engine_draws(client, answers):
    rules = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 11}
    answer = client.complete("demo", RECORD, max_tokens=12, ignore_eos=True, **rules)
    alone = answers(RECORD, 12, ignore_eos=True, sampling=Sampling(**rules))
    assert text_of(answer).strip() == alone.text


def test_a_full_batch_changes_no_answer(client, answers, needle):
    prompts = [RECORD, needle, RECORD.replace("lamp", "fork"), needle[:1] + needle[300:], RECORD, needle]
    alone = [answers(prompt, 10, ignore_eos=True).text for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(client.complete, "demo", prompt, max_tokens=10, ignore_eos=True) for prompt in prompts]
        assert [text_of(one.result()).strip() for one in asked] == alone


def test_a_chat_goes_through_the_template(client, chat_engine):
    from kvc_trt import Engine

    engine = Engine.open(chat_engine, threads=1)
    messages = [{"role": "user", "content": text(9, 10, 11)}]
    alone = engine.chat(messages, max_new_tokens=6, ignore_eos=True)
    body = {"model": "chat", "messages": messages, "max_tokens": 6, "ignore_eos": True}
    status, answer = client.ask("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"].replace(" ", "") == alone.text.replace(" ", "")
    assert answer["usage"]["prompt_tokens"] == len(alone.prompt_token_ids)


def test_stop_strings_end_an_answer_and_free_its_row(client):
    answer = client.complete("demo", RECORD, max_tokens=400, stop=["lagos"], ignore_eos=False)
    assert text_of(answer).strip() == "scarlet tiger"
    eventually(lambda: idle(client))


def test_the_longest_prompt_is_answered(client, answers, needle):
    longest = needle[:1] + (needle[1:] * 2)[:1023]
    answer = client.complete("demo", longest, max_tokens=4, ignore_eos=True)
    assert text_of(answer).strip() == answers(longest, 4, ignore_eos=True).text
    assert answer["usage"]["prompt_tokens"] == 1024


def test_requests_of_one_id_are_two_requests(client):
    import http.client

    found = []
    for _ in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", client.port)
        body = json.dumps({"model": "demo", "prompt": RECORD, "max_tokens": 8})
        headers = {"Content-Type": "application/json", "x-request-id": "the-same"}
        connection.request("POST", "/v1/completions", body, headers)
        found.append(connection)
    assert [text_of(json.loads(one.getresponse().read())) for one in found] == ["scarlet tiger lagos eight"] * 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(client, needle, stream):
    before = client.metric("kvc_trt_ended_total", model="demo", kind="cancelled")
    body = {"model": "demo", "prompt": needle, "max_tokens": LONG, "ignore_eos": True, "stream": stream}
    connection = client.open("/v1/completions", body)
    eventually(lambda: client.metric("kvc_trt_running", model="demo") == 1)
    connection.sock.close()
    connection.close()
    eventually(lambda: idle(client))
    assert client.metric("kvc_trt_ended_total", model="demo", kind="cancelled") == before + 1


def test_a_full_server_refuses_with_a_reason(client, needle):
    body = {"model": "demo", "prompt": needle, "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(24) as threads:
        found = [one.result() for one in [threads.submit(client.ask, "/v1/completions", body) for _ in range(24)]]
    refused = [answer["error"]["message"] for status, answer in found if status == 503]
    assert {status for status, _ in found} == {200, 503}
    assert all("busy" in message for message in refused)
    assert idle(client)


def test_a_worker_that_is_killed_breaks_its_answers_and_comes_back(served, client, needle):
    assert client.ask("/health")[0] == 200
    body = {"model": "demo", "prompt": needle, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    connection = client.open("/v1/completions", body)
    answer = connection.getresponse()
    answer.readline()
    (worker,) = [one for one in served.children("dynamo.worker") if "demo" in one.cmdline()]
    worker.kill()
    rest = answer.read().decode()
    connection.close()
    assert "Service temporarily unavailable" in rest
    assert client.ask("/health") == (
        503,
        {"status": "unhealthy", "models": {"chat": "answers", "demo": "does not answer"}},
    )
    eventually(lambda: client.ask("/health")[0] == 200, 60)
    assert "demo ended (signal 9) and is started again" in served.lines
    assert text_of(client.complete("demo", RECORD, max_tokens=8)).strip() == "scarlet tiger lagos eight"


def test_a_frontend_that_is_killed_breaks_its_answers_and_comes_back(served, client, needle):
    body = {"model": "demo", "prompt": needle, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    connection = client.open("/v1/completions", body)
    answer = connection.getresponse()
    answer.readline()
    (frontend,) = served.children("dynamo.frontend")
    frontend.kill()
    rest = answer.read().decode()
    connection.close()
    assert "the frontend does not answer" in rest
    eventually(lambda: client.ask("/health")[0] == 200, 60)
    eventually(lambda: idle(client))


def test_an_end_waits_for_the_answers_that_have_begun(demo_engine, needle, answers):
    """SIGTERM in a stream, with an API key, from a second server beside the first."""
    one = Served(str(demo_engine), "--port", "0", "--threads", "1", environment={"KVC_TRT_API_KEY": "a secret"})
    client = one.client("a secret")
    body = {"model": "demo", "prompt": needle, "max_tokens": 400, "ignore_eos": True}
    stream = client.stream("/v1/completions", body)
    events = [next(stream)]
    ending = threading.Thread(target=lambda: events.extend(stream))
    ending.start()
    for path in ("/v1/models", "/metrics", "/health"):
        status, refused = one.client("another").ask(path)
        assert status == 401
        assert "API key" in refused["error"]["message"]
    assert one.client().ask("/v1/completions", {"model": "demo", "prompt": "lamp"})[0] == 401
    assert one.client().ask("/live")[0] == 200
    assert one.end(signal.SIGTERM) == 0
    ending.join(10)
    alone = answers(needle, 400, ignore_eos=True)
    assert "".join(event["choices"][0]["text"] for event in events).strip() == alone.text


def test_engines_that_cannot_be_served_are_refused_in_one_line(demo_engine, tmp_path, tiny_engine):
    one = Served(str(tiny_engine), "--port", "0")
    assert one.process.wait(60) == one.end() == 2
    assert "has no tokenizer" in one.lines[0]
    changed = tiny_engine / "decode.onnx"
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    one = Served(str(tiny_engine), "--port", "0")
    assert one.process.wait(60) == one.end() == 2
    assert one.lines[0].startswith("error: ")
    assert "decode.onnx" in one.lines[0]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no process groups")
def test_a_server_that_is_killed_leaves_nothing_behind(demo_engine, tmp_path):
    """No process is left, and no directory once the next server has begun."""
    temporary = {"TMPDIR": str(tmp_path)}
    one = Served(str(demo_engine), "--port", "0", "--threads", "1", environment=temporary)
    one.until("ready at")
    below = psutil.Process(one.process.pid).children(recursive=True)
    assert len(below) == 2
    one.process.kill()
    _, left = psutil.wait_procs(below, timeout=40)
    assert left == []
    (directory,) = tmp_path.glob("kvc-trt-serve-*")
    other = Served(str(demo_engine), "--port", "0", "--threads", "1", environment=temporary)
    other.until("ready at")
    assert not directory.exists()
    assert other.end() == 0
    assert list(tmp_path.glob("kvc-trt-serve-*")) == []
