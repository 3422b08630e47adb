"""The light server refuses bad requests with a reason and a status below 500, whatever a client sends."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvc_trt.serving.http import server
from kvc_trt.serving.protocol import documents
from tests.readable_model import text
from tests.serving.dynamo.served import LONG, eventually
from tests.serving.http.in_process import InProcess
from tests.serving.http.malformed import bad_answers, requests

CHAT = {"model": "chat", "messages": [{"role": "user", "content": text(9)}], "max_tokens": 2}
COMPLETION = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 2}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL_RESULT = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": text(9)},
]
BAD_CHATS = [
    ({"messages": []}, "there is no message"),
    ({"messages": [{"role": "user"}]}, "message 0: content is missing"),
    ({"messages": [{"role": "nobody", "content": "?"}]}, "role is 'nobody'"),
    ({"messages": [{"role": "user", "content": 5}]}, "'content' must be text, found 5"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "part 0 of content has the type 'image_url', and the model reads text alone",
    ),
    ({"messages": [{"role": "user", "content": text(9) * 300}]}, "expected at most 256"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop: expected up to 4 texts, found 5 texts"),
    ({"reasoning_effort": "low"}, "reasoning_effort is not supported"),
    ({"modalities": ["audio"]}, "modalities is not supported, found ['audio']: the model reads and writes text alone"),
    ({"web_search_options": {}}, "web_search_options is not supported"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction is not supported"),
    ({"messages": TOOL_RESULT}, "messages: the chat template refuses these messages: no tools here"),
    ({"max_tokens": 1000}, "max_tokens is 1000, expected 1 to "),
    ({"return_kv_proof": "digest"}, "was not opened for proofs"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("bad", "named"), BAD_CHATS, ids=[json.dumps(bad)[:40] for bad, _ in BAD_CHATS])
def test_a_bad_chat_is_an_error_of_that_request_alone(client, bad, named, stream):
    status, answer = client.ask("/v1/chat/completions", {**CHAT, "stream": stream, **bad})
    assert status == 400, answer
    assert named in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert "/" not in answer["error"]["message"]
    assert client.ask("/v1/chat/completions", CHAT)[0] == 200


def test_a_model_without_a_template_names_the_other_endpoint(client):
    status, answer = client.ask("/v1/chat/completions", {**CHAT, "model": "demo"})
    assert (status, answer["error"]["message"]) == (
        400,
        "the model demo has no chat template, so it takes no messages: ask /v1/completions",
    )


@pytest.mark.parametrize("name", ["nobody", 'de"mo', "de\nmo", "{{demo}}", "../demo", ""])
def test_an_unknown_model_name_is_refused(client, name):
    status, answer = client.ask("/v1/completions", {**COMPLETION, "model": name})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/embeddings", "makes no embeddings"),
        ("/v1/responses", "ask /v1/chat/completions"),
        ("/v1/images/generations", "makes no images"),
        ("/v1/audio/transcriptions", "reads and writes text alone"),
        ("/anything", "there is nothing at this path"),
        ("/v1/anything", "there is nothing at this path"),
    ],
)
def test_an_unknown_path_is_refused_by_name(client, path, why):
    status, answer = client.ask(path, {"model": "demo", "input": "?"})
    assert status == 404
    assert why in answer["error"]["message"]


def test_another_method_is_refused(client):
    status, answer = client.ask("/v1/completions")
    assert (status, answer["error"]["message"]) == (405, "/v1/completions takes POST requests")
    assert client.ask("/v1/models", {})[0] == 405


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"model": "demo", "prompt": "\xff"}', b"[" * 100_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_invalid_bodies_are_refused(client, path, content):
    status, answer = client.ask(path, content=content)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_of_very_many_values_is_refused(client, path):
    status, answer = client.ask(path, content=b'{"model": "demo", "prompt": [' + b"[]," * 300_000 + b"1]}")
    assert status == 400
    assert answer["error"]["message"] == "the body: it holds more than 262144 objects, lists and texts"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {"model": "demo"}, "either prompt or messages"),
        ("/tokenize", {"model": "demo", "prompt": 5}, "prompt is 5, expected a text"),
        ("/tokenize", {"model": "demo", "prompt": "a", "promt": "b"}, "unknown field 'promt'; did you mean 'prompt'?"),
        ("/tokenize", {"model": "demo", "messages": []}, "has no chat template"),
        ("/detokenize", {"model": "demo"}, "tokens is missing"),
        ("/detokenize", {"model": "demo", "tokens": ["a"]}, "token 0 is 'a'"),
        ("/detokenize", {"model": "demo", "tokens": [10**9]}, "token 0 is 1000000000"),
    ],
)
def test_invalid_tokenize_requests_are_refused(client, path, body, named):
    status, answer = client.ask(path, body)
    assert status == 400
    assert named in answer["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br"},
        {"Content-Encoding": "zstd"},
        {"Content-Type": "text/plain; charset=nothing"},
        {"Expect": "something"},
    ],
)
def test_no_header_is_the_servers_failure(served, headers):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("POST", "/v1/completions", b"no compressed data", headers)
    assert 400 <= connection.getresponse().status < 500
    connection.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "a" * (256 * 1024)}]}),
        ("/v1/completions", {"model": "demo", "prompt": "a" * (1024 * 1024 + 1)}),
    ],
)
def test_a_text_that_cannot_be_short_enough_is_not_tokenised(client, path, body):
    status, answer = client.ask(path, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert " characters, expected at most " in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_does_not_come_is_not_waited_for(served, monkeypatch, path):
    monkeypatch.setattr(server, "BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{{".encode())
        said = connection.recv(10_000).decode()
    assert said.startswith("HTTP/1.1 408")
    assert "was not complete within 0.1 seconds" in said


def test_several_hundred_malformed_requests_are_never_the_servers_failure(client):
    assert bad_answers(client, requests(seed=1, count=400)) == []


@pytest.mark.exhaustive
def test_ten_thousand_malformed_requests_are_never_the_servers_failure(client):
    assert bad_answers(client, requests(seed=2, count=10_000)) == []


def test_a_full_server_refuses_with_a_reason(demo_engine):
    with InProcess({"demo": demo_engine}, rows=1, queue_limit=2) as server:
        client = server.client()
        body = {**COMPLETION, "max_tokens": 200, "ignore_eos": True}
        with ThreadPoolExecutor(12) as threads:
            found = [one.result() for one in [threads.submit(client.ask, "/v1/completions", body) for _ in range(12)]]
        assert {status for status, _ in found} == {200, 503}
        assert all("busy" in answer["error"]["message"] for status, answer in found if status == 503)
        running = http.client.HTTPConnection("127.0.0.1", server.port)
        running.request("POST", "/v1/completions", json.dumps({**body, "max_tokens": LONG}))
        eventually(lambda: client.metric("kvc_trt_running") == 1)
        status, _ = client.ask("/v1/completions", {**body, "n": 3})
        assert status == 503, "all of its answers, or none"
        running.close()
        eventually(lambda: client.metric("kvc_trt_running") + client.metric("kvc_trt_waiting") == 0)


@pytest.mark.parametrize(
    ("asked", "found"),
    [({"n": 4}, "4 answers"), ({"n": 2, "prompt": [[5, 6], [7]]}, "4 answers (2 to each of 2 prompts)")],
)
def test_more_answers_than_ever_fit_are_the_clients_error(demo_engine, asked, found):
    with InProcess({"demo": demo_engine}, rows=1, queue_limit=2) as server:
        status, answer = server.client().ask("/v1/completions", {**COMPLETION, **asked})
        assert status == 400
        assert f"n: {found} exceed this server's capacity of 3" in answer["error"]["message"]
        assert answer["error"]["param"] == "n"


def test_a_salt_is_refused_where_prompts_share_their_beginnings(client, demo_engine):
    assert client.ask("/v1/completions", {**COMPLETION, "cache_salt": "mine"})[0] == 200
    with InProcess({"demo": demo_engine}, prefix_bytes=1 << 20) as server:
        assert server.client().ask("/v1/completions", COMPLETION)[0] == 200
        status, answer = server.client().ask("/v1/completions", {**COMPLETION, "cache_salt": "mine"})
        assert (status, answer["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize("bad", ["soon", 1.5, True])
def test_a_priority_is_a_whole_number(client, bad):
    status, answer = client.ask("/v1/completions", {**COMPLETION, "priority": bad})
    assert (status, answer["error"]["param"]) == (400, "priority")


def test_every_path_but_live_needs_the_key(chat_engine):
    with InProcess({"chat": chat_engine}, api_key="a secret") as server:
        for path in ("/v1/models", "/metrics", "/health", "/version", "/nothing"):
            for client in (server.client(), server.client("another"), server.client("\xff")):
                status, refused = client.ask(path)
                assert (status, refused["error"]["code"]) == (401, "invalid_api_key")
        assert server.client().ask("/v1/chat/completions", CHAT)[0] == 401
        assert server.client().ask("/live")[0] == 200
        assert server.client("a secret").ask("/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_failure_has_an_id_and_is_logged(client, monkeypatch, caplog, stream):
    def fails(*arguments):
        raise ZeroDivisionError("in /a/path")

    place = "Documents.response" if not stream else "Documents.usage_chunk"
    monkeypatch.setattr(documents.Documents, place.partition(".")[2], fails)
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with caplog.at_level(logging.ERROR):
        connection = client.open("/v1/completions", {**COMPLETION, **more})
        answer = connection.getresponse()
        said = answer.read().decode()
        connection.close()
    assert answer.status == (200 if stream else 500)
    error = json.loads(said.strip().rpartition("data: ")[2])["error"]
    assert error["type"] == "server_error"
    assert "/a/path" not in said
    identity = error["message"].rpartition(" ")[2]
    (record,) = [one for one in caplog.records if identity in one.getMessage()]
    assert record.exc_info[0] is ZeroDivisionError
