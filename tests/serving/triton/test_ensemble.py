"""The four models of TensorRT-LLM's family in a real tritonserver: the answers of `kvc-trt run`, whole and streamed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvc_trt
from kvc_trt.backends.opening import open_engine
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.triton.family.ensemble import export_ensemble
from tests.serving.triton.prompts import ANSWER, LAMP, PROMPTS, answered_alone, answered_by_run, talkative_engine
from tests.serving.triton.server import check_environment, grpc, serving, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

ENDLESS = {"text_input": LAMP, "max_tokens": 8000, "end_id": -1, "stream": True}


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """An engine with answers so long that a client is gone before they end: text is made more slowly than tokens."""
    return talkative_engine(tmp_path_factory, 8000)


@pytest.fixture(scope="module")
def server(talkative, tmp_path_factory):
    """A repository that nobody may write to."""
    check_environment()
    repository = tmp_path_factory.mktemp("triton") / "repository"
    export_ensemble(open_engine(talkative), repository, ServingSettings(rows=4))
    paths = [repository, *repository.rglob("*")]
    for path in paths:
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    with serving(repository, tmp_path_factory.mktemp("server")) as one:
        yield one
    for path in repository.rglob("*"):  # the superuser may write all the same, as Python does with what it compiles
        assert path in paths or "__pycache__" in path.parts
    for path in paths:
        if path.is_dir():
            os.chmod(path, 0o755)


@pytest.fixture(scope="module")
def alone(talkative):
    """The engine's answer to each prompt alone."""
    return [output.text for output in answered_alone(talkative)]


def ended(server, kind):
    return server.metric("kvc_trt_ended_total", model="tensorrt_llm", kind=kind)


def test_the_ensemble_answers_as_kvc_trt_run_does(server, talkative, capfd):
    expected = answered_by_run(talkative, PROMPTS[4], capfd)
    wanted = dict.fromkeys(("finish_reason", "num_input_tokens", "num_output_tokens", "kv_cache_tokens"), True)
    fields = {"text_input": PROMPTS[4], "max_tokens": 100, "bad_words": "", "stop_words": ""}
    reply = server.generate("ensemble", **fields, **{f"return_{name}": value for name, value in wanted.items()})
    assert (reply.status, reply.body["text_output"]) == (200, expected["text"])
    assert reply.body["finish_reason"] == expected["finish_reason"]
    assert reply.body["num_input_tokens"] == len(expected["prompt_token_ids"])
    assert reply.body["num_output_tokens"] == len(expected["token_ids"])
    assert reply.body["kv_cache_tokens_kept"] == sum(expected["cache"]["physical"])


def test_a_stream_loses_no_space(server):
    events = server.stream("ensemble", text_input=LAMP, max_tokens=20, stream=True)
    assert [event["text_output"] for event in events] == ["scarlet", " tiger", " lagos", " eight", ""]


def test_several_clients_get_what_each_gets_alone(server, alone):
    """More than there are rows, half of them streamed."""

    def ask(index):
        fields = {"text_input": PROMPTS[index], "max_tokens": 40, "end_id": -1}
        if index % 2:
            return "".join(event["text_output"] for event in server.stream("ensemble", stream=True, **fields))
        return server.generate("ensemble", **fields).body["text_output"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, range(len(PROMPTS)))) == alone


def test_grpc_streams_interleave_and_have_the_shape_of_the_family(server, alone):
    rules = {"max_tokens": 40, "end_id": -1, "stream": True, "beam_width": 1, "temperature": 0.0}
    came = grpc(server, "ensemble", [(f"r{index}", {"text_input": PROMPTS[index], **rules}) for index in range(3)])
    for index in range(3):
        own = [one for one in came if one["id"] == f"r{index}"]
        assert "".join(one["text"] for one in own) == alone[index]
        assert {one["dimensions"] for one in own} <= {1, None}, "clients read text_output[0]"


def test_the_middle_step_answers_token_ids_with_token_ids(server, talkative):
    engine = kvc_trt.Engine.open(talkative)
    expected = engine.generate(LAMP, max_new_tokens=6)
    ids = list(expected.prompt_token_ids)
    fields = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 6, "streaming": True}
    came = grpc(server, "tensorrt_llm", [("x", fields)])
    assert [token for one in came for token in one["ids"]] == list(expected.token_ids)


def test_every_rule_reaches_the_engine(server):
    rules = {"temperature": 1.5, "seed": 7, "top_k": 50, "max_tokens": 12, "end_id": -1}
    first, second = (server.generate("ensemble", text_input=LAMP, **rules).body["text_output"] for _ in range(2))
    assert first == second != ANSWER
    for stop, text in (("lagos", "scarlet tiger "), ("agos e", "scarlet tiger l")):
        events = server.stream("ensemble", text_input=LAMP, stream=True, stop_words=[stop])
        assert "".join(event["text_output"] for event in events) == text
    assert "tiger" not in server.generate("ensemble", text_input=LAMP, bad_words=["tiger"]).body["text_output"]
    echoed = server.generate("ensemble", text_input=LAMP, exclude_input_in_output=False).body["text_output"]
    assert echoed == LAMP + ANSWER


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 3}, "found none"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"text_input": LAMP, "max_token": 3}, "did you mean 'max_tokens'?"),
        ({"text_input": LAMP, "max_tokens": 0}, "at least 1, found 0"),
        ({"text_input": LAMP, "max_tokens": 10**6}, "positions for 10048 tokens"),
        ({"text_input": "lamp " * 3000}, "prompt has 3001 tokens, expected at most 2048"),
        ({"text_input": LAMP, "beam_width": 4}, "beam_width is 4"),
        ({"text_input": LAMP, "return_context_logits": True}, "return_context_logits is True"),
        ({"text_input": LAMP, "lora_task_id": 1}, "lora_task_id is not supported"),
        ({"text_input": LAMP, "embedding_bias_words": "a"}, "embedding_bias_words is not supported"),
    ],
)
def test_inputs_that_cannot_be_honoured_are_refused_by_name(server, fields, message):
    reply = server.generate("ensemble", **fields)
    assert (reply.status, message in reply.body["error"]) == (400, True), reply
    assert server.generate("ensemble", text_input=LAMP).body["text_output"] == ANSWER


def test_unsupported_inputs_are_refused_over_grpc_too(server):
    (one,) = grpc(server, "ensemble", [("x", {"text_input": LAMP, "lora_task_id": 1})])
    assert "lora_task_id" in one["error"]


def test_bad_bytes_are_refused(server):
    reply = server.post("v2/models/ensemble/generate", b'{"text_input":"\xff\xfe"}')
    assert (reply.status, "not valid UTF-8" in str(reply.body)) == (400, True)


def test_a_client_that_leaves_a_stream_frees_its_row(server):
    before = ended(server, "cancelled")
    stream = server.open_stream("ensemble", **ENDLESS)
    stream.readline()
    stream.close()
    wait_until(lambda: ended(server, "cancelled") == before + 1)
    grpc(server, "ensemble", [("x", ENDLESS)], leave_after=3)
    wait_until(lambda: ended(server, "cancelled") == before + 2)
    wait_until(lambda: server.metric("kvc_trt_running", model="tensorrt_llm") == 0)
    assert server.generate("ensemble", text_input=LAMP).body["text_output"] == ANSWER


def test_answers_that_are_late_fail_in_the_middle_and_the_server_still_ends(server):
    """Triton 2.51 loses count of an ensemble's steps if one fails while text is made; `serving` checks that it stops.

    With four answers, much text waits for the tokenizer when the deadline comes.
    """
    came = grpc(server, "ensemble", [(f"r{index}", ENDLESS) for index in range(4)], timeout=1_500_000)
    errors = [one["error"] for one in came if "error" in one]
    assert any(one.get("text") for one in came), "a part was sent"
    assert len(errors) == 4
    assert all("the deadline came before" in error for error in errors)
    wait_until(lambda: server.metric("kvc_trt_running", model="tensorrt_llm") == 0)


def test_a_changed_tokenizer_fails_the_load(talkative, tmp_path):
    export_ensemble(open_engine(talkative), tmp_path / "repository")
    file = tmp_path / "repository" / "preprocessing" / "1" / "tokenizer.json"
    content = file.read_bytes()
    file.unlink()  # it may be a link to the engine's
    file.write_bytes(content + b" ")
    with pytest.raises(AssertionError, match="another tokenizer"), serving(tmp_path / "repository", tmp_path):
        pass
