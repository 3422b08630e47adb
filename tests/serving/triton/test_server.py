"""The exported repository in a real tritonserver on loopback: answers, errors, cancelling, and its end."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.triton.repository import export_model
from tests.serving.triton.prompts import ANSWER, LAMP, PROMPTS, answered_alone, answered_by_run, talkative_engine
from tests.serving.triton.server import NO_REPLY, check_environment, grpc, serving, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

LONG = "amber " * 600 + LAMP
TALE = {"text_input": LAMP, "ignore_eos": True, "max_tokens": 1500}
LONGEST = 12_000
ENDLESS = {**TALE, "max_tokens": LONGEST}
"""It is cancelled long before it ends, however late its client is."""


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """An engine whose answers can be long enough to be cancelled."""
    return talkative_engine(tmp_path_factory, LONGEST)


@pytest.fixture(scope="module")
def repository(talkative, tmp_path_factory):
    """Exported to one place and moved to another."""
    check_environment()
    directory = tmp_path_factory.mktemp("triton")
    engine = open_engine(talkative)
    export_model(engine, directory / "made", "tiny")
    export_model(engine, directory / "made", "small", ServingSettings(rows=1, queue_limit=1))
    export_model(engine, directory / "made", "tampered")
    export_model(engine, directory / "made", "speechless")
    export_model(engine, directory / "made", "cramped", ServingSettings(memory_bytes=1000))
    moved = directory / "moved"
    shutil.copytree(directory / "made", moved)  # a copy: files of an export may be links to the engine's
    weights = moved / "tampered" / "1" / "engine" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    (moved / "speechless" / "1" / "engine" / "tokenizer" / "tokenizer.json").unlink()
    shutil.rmtree(directory / "made")
    return moved


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory):
    options = ("--model-control-mode=explicit", "--load-model=tiny", "--load-model=small")
    files = {path: path.stat().st_mtime_ns for path in repository.rglob("*") if path.is_file()}
    with serving(repository, tmp_path_factory.mktemp("server"), *options) as one:
        yield one
    after = {path: path.stat().st_mtime_ns for path in repository.rglob("*") if path.is_file()}
    assert {path for path in after if "__pycache__" not in path.parts} == set(files), "a repository may be read-only"
    assert all(after[path] == files[path] for path in files)


@pytest.fixture(scope="module")
def alone(talkative):
    """The engine's answer to each prompt alone."""
    return answered_alone(talkative)


def ids_of(body):
    """Triton writes a list of one element as that element."""
    found = body["output_ids"]
    return found if isinstance(found, list) else [found]


def ended(server, kind, model="tiny"):
    return server.metric("kvc_trt_ended_total", model=model, kind=kind)


def test_the_server_answers_as_kvc_trt_run_does(server, talkative, capfd):
    expected = answered_by_run(talkative, LONG, capfd)
    reply = server.generate(
        "tiny", text_input=LONG, return_output_ids=True, return_finish_reason=True, return_num_input_tokens=True,
        return_num_output_tokens=True, return_kv_cache_tokens=True,
    )  # fmt: skip
    assert (reply.status, reply.body["text_output"]) == (200, expected["text"])
    assert reply.body["output_ids"] == expected["token_ids"]
    assert reply.body["finish_reason"] == expected["finish_reason"]
    assert reply.body["num_input_tokens"] == len(expected["prompt_token_ids"])
    assert reply.body["num_output_tokens"] == len(expected["token_ids"])
    assert reply.body["kv_cache_tokens_kept"] == sum(expected["cache"]["physical"])
    assert reply.body["kv_cache_tokens_total"] > reply.body["kv_cache_tokens_kept"]


def test_a_stream_loses_no_space(server):
    events = server.stream("tiny", text_input=LAMP, stream=True, return_finish_reason=True)
    assert [event["text_output"] for event in events] == ["scarlet", " tiger", " lagos", " eight", ""]
    assert events[-1]["finish_reason"] == "stop"


def test_a_full_batch_answers_as_each_alone(server, alone):
    """Half of them streamed."""

    def ask(index):
        fields = {"text_input": PROMPTS[index], "max_tokens": 40, "ignore_eos": True, "return_output_ids": True}
        if index % 2:
            return [token for event in server.stream("tiny", stream=True, **fields) for token in ids_of(event)]
        return ids_of(server.generate("tiny", **fields).body)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(ask, range(len(PROMPTS))))
    assert answers == [list(output.token_ids) for output in alone]


def test_requests_of_one_grpc_stream_interleave_also_under_one_id(server, alone):
    rules = {"max_tokens": 40, "ignore_eos": True, "stream": True, "return_output_ids": True}
    requests = [(f"r{index}", {"text_input": prompt, **rules}) for index, prompt in enumerate(PROMPTS[:3])]
    came = grpc(server, "tiny", requests)
    for index, output in enumerate(alone[:3]):
        own = [one for one in came if one["id"] == f"r{index}"]
        assert [token for one in own for token in one["ids"]] == list(output.token_ids)
        assert "".join(one["text"] for one in own) == output.text
        assert [one["final"] for one in own] == [False] * (len(own) - 1) + [True]
    # Endless, because the client's threads let the second request wait while tokens of the first pour in.
    both = [("endless", {**ENDLESS, "stream": True}), ("short", {"text_input": LAMP, "stream": True})]
    came = grpc(server, "tiny", both, leave_with=["short"])
    assert {one["id"] for one in came} == {"endless", "short"}
    assert [one["id"] for one in came if one["final"]] == ["short"], "one after the other"
    same = grpc(server, "tiny", [("x", {"text_input": LAMP}), ("x", {"text_input": LAMP})])
    assert [one["text"] for one in same if one["text"]] == [ANSWER] * 2


def test_every_rule_reaches_the_engine(server):
    assert server.generate("tiny", text_input=LAMP, stop_words=["lagos"]).body["text_output"] == "scarlet tiger "
    assert server.generate("tiny", text_input=LAMP, bad_words="", stop_words="").body["text_output"] == ANSWER
    assert "tiger" not in server.generate("tiny", text_input=LAMP, bad_words=["tiger"]).body["text_output"]
    drawn = {"temperature": 1.5, "seed": 7, "top_k": 50, "max_tokens": 12, "ignore_eos": True}
    first, second = (server.generate("tiny", text_input=LAMP, **drawn).body["text_output"] for _ in range(2))
    assert first == second != ANSWER
    written = json.dumps({**drawn, "temperature": "1.5"})
    assert server.generate("tiny", text_input=LAMP, sampling_parameters=written).body["text_output"] == first
    (over_grpc, *_) = grpc(server, "tiny", [("", {"text_input": LAMP, **drawn})])
    assert over_grpc["text"] == first
    echoed = server.generate("tiny", text_input=LAMP, exclude_input_in_output=False).body["text_output"]
    assert echoed == LAMP + ANSWER


BAD = [
    ({}, 400, "has 0 inputs"),
    ({"max_tokens": 3}, 400, "found neither"),
    ({"text_input": ""}, 400, "the prompt is empty"),
    ({"text_input": LAMP, "input_ids": [1]}, 400, "found both"),
    ({"text_input": LAMP, "max_token": 3}, 400, "did you mean 'max_tokens'?"),
    ({"text_input": LAMP, "max_tokens": 0}, 400, "at least 1, found 0"),
    ({"text_input": LAMP, "max_tokens": -5}, 400, "at least 1, found -5"),
    ({"text_input": LAMP, "max_tokens": 10**6}, 400, "positions for 14048 tokens"),
    ({"text_input": LAMP, "max_tokens": "3"}, 500, "Unable to parse"),
    ({"text_input": 5}, 500, "Unable to parse"),
    ({"text_input": [LAMP, LAMP]}, 400, "batch-size must be <= 1"),
    ({"text_input": "lamp " * 3000}, 400, "prompt has 3001 tokens, expected at most 2048"),
    ({"text_input": LAMP, "temperature": -1}, 400, "temperature must be"),
    ({"text_input": LAMP, "sampling_parameters": "{"}, 400, "not valid JSON"),
    ({"text_input": LAMP, "sampling_parameters": '{"temprature": 1}'}, 400, "did you mean 'temperature'?"),
    ({"text_input": LAMP, "parameters": {"temprature": 1}}, 400, "did you mean 'temperature'?"),
    ({"text_input": LAMP, "beam_width": 4}, 400, "beam_width is 4"),
    ({"input_ids": [10**5]}, 400, "token 0 is 100000"),
]


@pytest.mark.parametrize(("fields", "status", "message"), BAD)
def test_a_bad_request_is_an_error_of_its_own(server, repository, fields, status, message):
    """The two of status 500 are refused by Triton, before the model sees them."""
    reply = server.generate("tiny", **fields)
    assert (reply.status, message in reply.body["error"]) == (status, True), reply
    assert str(repository.parent) not in reply.body["error"]


def test_bad_bytes_are_refused_and_a_bad_stream_has_an_error_status(server):
    for path in ("generate", "generate_stream"):
        request = b'{"text_input":"\xff\xfe"}'
        reply = server.post(f"v2/models/tiny/{path}", request)
        assert (reply.status, "not valid UTF-8" in str(reply.body)) == (400, True)
    assert server.post("v2/models/tiny/generate", b"nonsense").status == 500
    assert server.generate("tiny", text_input=LAMP).body["text_output"] == ANSWER


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a{b}", "../tiny", "tiny "])
def test_an_unknown_model_name_is_refused(server, repository, name):
    reply = server.post(f"v2/models/{urllib.parse.quote(name, safe='')}/generate", b'{"text_input": "x"}')
    assert reply.status in (400, 404)
    assert str(repository.parent) not in str(reply.body)
    assert server.generate("tiny", text_input=LAMP).body["text_output"] == ANSWER


def test_a_client_that_leaves_frees_its_row(server):
    before = ended(server, "cancelled")
    stream = server.open_stream("tiny", stream=True, **ENDLESS)
    stream.readline()
    stream.close()
    wait_until(lambda: ended(server, "cancelled") == before + 1)
    assert server.metric("kvc_trt_running", model="tiny") == 0


def test_a_grpc_client_that_cancels_frees_its_rows(server):
    """A request that does not stream frees its rows as well.

    That one is sent first, so the model has it when the stream begins: a request that Triton has not yet passed on
    when its client leaves never reaches the model, and nothing is counted.
    """
    before = ended(server, "cancelled")
    came = grpc(server, "tiny", [("whole", ENDLESS), ("stream", {**ENDLESS, "stream": True})], leave_after=3)
    assert {one["id"] for one in came} == {"stream"}
    wait_until(lambda: ended(server, "cancelled") == before + 2)


def test_a_client_of_generate_that_leaves_is_answered_to_the_end(server):
    """Triton reads nothing from a connection before it has answered (server#7077), so max_tokens ends the row."""
    before, body = server.metric("kvc_trt_submitted_total", model="tiny"), json.dumps(TALE)
    head = f"POST /v2/models/tiny/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http)) as connection:
        connection.sendall((head + body).encode())
        wait_until(lambda: server.metric("kvc_trt_submitted_total", model="tiny") == before + 1)
    wait_until(lambda: server.metric("kvc_trt_running", model="tiny") == 0)
    assert server.generate("tiny", text_input=LAMP).body["text_output"] == ANSWER


def test_a_full_queue_refuses_and_loses_nothing(server):
    """Triton 2.51 makes a 400 of every error of a model that streams."""
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: server.generate("small", **TALE), range(6)))
    assert {reply.status for reply in replies} == {200, 400}
    assert len({reply.body["text_output"] for reply in replies if reply.status == 200}) == 1
    assert all("1 requests wait" in reply.body["error"] for reply in replies if reply.status == 400)


def test_metrics_say_what_happened(server):
    server.generate("tiny", text_input=LONG)
    wait_until(lambda: server.metric("kvc_trt_evicted_tokens_total", model="tiny") > 0)
    for name in ("submitted_total", "generated_tokens_total", "kept_tokens_total", "seconds_to_first_token_count"):
        assert server.metric(f"kvc_trt_{name}", model="tiny") > 0, name
    assert server.metric("kvc_trt_seconds_per_token_bucket", model="tiny", le="+Inf") > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tampered", "weights.safetensors"),
        ("speechless", "tokenizer/tokenizer.json"),
        ("cramped", "expected at most 1000 B"),
    ],
)
def test_engines_that_cannot_answer_are_not_loaded(server, model, message):
    """Neither an engine that was changed or lacks a file, nor one that cannot answer its first request."""
    reply = server.post(f"v2/repository/models/{model}/load")
    assert reply.status == 400
    assert message in server.log
    assert server.generate(model, text_input=LAMP).status in (400, 404)
    assert server.generate("tiny", text_input=LAMP).body["text_output"] == ANSWER


def test_a_model_is_unloaded_and_loaded_again(server):
    assert server.post("v2/repository/models/small/unload").status == 200
    wait_until(lambda: server.generate("small", text_input=LAMP).status in (400, 404))
    assert server.post("v2/repository/models/small/load").status == 200
    assert server.generate("small", text_input=LAMP).body["text_output"] == ANSWER


def test_the_end_of_the_server_lets_a_stream_finish(repository, tmp_path):
    """`serving` checks its exit code and the shared memory."""
    only = tmp_path / "only"
    only.mkdir()
    (only / "tiny").symlink_to(repository / "tiny")
    with serving(only, tmp_path, "--model-control-mode=none") as server:
        stream = server.open_stream("tiny", stream=True, return_finish_reason=True, **TALE)
        first = stream.readline()
        ending = threading.Thread(target=server.process.terminate)
        ending.start()
        lines = [first, *stream.readlines()]
        events = [json.loads(line[len(b"data: ") :]) for line in lines if line.startswith(b"data: ")]
        assert len(events) > 1000
        assert events[-1]["finish_reason"] in ("length", "capacity")
        ending.join()


def test_a_model_whose_process_died_does_not_answer(repository, tmp_path):
    """Triton goes on to call it ready, or rarely aborts on a lock of the dead one: only an answer shows life."""
    only = tmp_path / "only"
    only.mkdir()
    (only / "tiny").symlink_to(repository / "tiny")
    with serving(only, tmp_path) as server:
        assert server.generate("tiny", text_input=LAMP).body["text_output"] == ANSWER
        server.kill_stubs()
        status = server.generate("tiny", text_input=LAMP).status
        assert status >= 400 or status == NO_REPLY, server.log
        server.kill()
