"""`kvc-trt serve --kv-proofs`: an answer over HTTP can be checked by who has the engine, and a changed one is named."""

from __future__ import annotations

import copy
import json
import signal

import pytest

from kvc_trt.cli.main import run
from kvc_trt.proof import document_of
from kvc_trt.proof.file import proof_of
from tests.serving.dynamo.served import Client, Served, eventually
from tests.verify.test_proof_replay import resealed

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

ANSWER = 6
CHAT_ANSWER = 4


@pytest.fixture(scope="module")
def aggregated(demo_engine, chat_engine):
    one = Served(f"demo={demo_engine}", f"chat={chat_engine}", "--port", "0", "--threads", "1", "--kv-proofs")
    yield one.client()
    assert one.end(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def apart(demo_engine, tmp_path_factory):
    store = str(tmp_path_factory.mktemp("store"))
    parts = [Served("--role", "frontend", "--port", "0", "--store", store)]
    for role in ("prefill", "decode"):
        options = ["--role", role, "--store", store, "--threads", "1", "--kv-proofs"]
        parts.append(Served(f"demo={demo_engine}", *options))
    client = parts[0].client()
    eventually(lambda: client.ask("/health")[0] == 200, 60)
    yield client
    for part in reversed(parts):
        assert part.end(signal.SIGINT) == 0


@pytest.fixture(params=["aggregated", "apart"])
def client(request) -> Client:
    return request.getfixturevalue(request.param)


def asked(prompt, kind, **more):
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": ANSWER,
        "ignore_eos": True,
        "return_kv_proof": kind,
        **more,
    }


def proof_in(answer):
    return answer["choices"][0]["kvc"]["kv_proof"]


def plain(proof):
    return json.loads(json.dumps(document_of(proof)))


@pytest.fixture(scope="module")
def alone(demo_engine, needle):
    """The proof of the engine without a server, with lists."""
    from kvc_trt import Engine

    engine = Engine.open(demo_engine, threads=1, proofs=True)
    return engine.generate(needle, max_new_tokens=ANSWER, ignore_eos=True, kv_proof="lists").kv_proof


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_an_answer_carries_the_proof_of_the_engine_alone(client, needle, alone, kind, stream):
    body = asked(needle, kind)
    if stream:
        *others, answer = client.stream("/v1/completions", body)
        assert "kv_proof" not in str(others)
    else:
        status, answer = client.ask("/v1/completions", body)
        assert status == 200, answer
    found = proof_in(answer)
    assert (found["kind"], found["root"]) == (kind, alone.root)
    if kind == "lists":
        assert found == plain(alone)


def test_a_file_of_an_answer_is_replayed(client, needle, demo_engine, tmp_path, capfd):
    file = tmp_path / "proof.json"
    file.write_text(json.dumps(proof_in(client.ask("/v1/completions", asked(needle, "lists"))[1])))
    assert run(["verify", str(demo_engine), "--replay", str(file)]) == 0
    assert "lists leave tokens out" in capfd.readouterr().out


def test_a_changed_answer_is_named_by_cache_and_step(client, needle, demo_engine, tmp_path, capfd):
    """Whoever changes a token of the answer, and makes digests and root anew, cannot know the lists after it."""
    proof = proof_of(proof_in(client.ask("/v1/completions", asked(needle, "digest"))[1]), "the answer")
    other = (proof.answer_token_ids[0] % 300 + 6, *proof.answer_token_ids[1:])
    file = tmp_path / "proof.json"
    file.write_text(json.dumps(document_of(resealed(proof, answer_token_ids=other))))
    assert run(["verify", str(demo_engine), "--replay", str(file)]) == 1
    printed = capfd.readouterr()
    assert "DIFFERS: cache 0, step 1: neither the reference nor the engine" in printed.out
    bare = copy.deepcopy(document_of(proof))
    bare["answer_token_ids"] = list(other)
    file.write_text(json.dumps(bare))
    assert run(["verify", str(demo_engine), "--replay", str(file)]) == 1
    assert "answer_token_ids are not those of answer_digest" in capfd.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_carries_the_proof_of_the_engine_alone(aggregated, chat_engine, stream):
    from kvc_trt import Engine
    from tests.readable_model import text

    messages = [{"role": "user", "content": text(*range(8, 48), *range(8, 48))}]
    engine = Engine.open(chat_engine, threads=1, proofs=True)
    expected = engine.chat(messages, max_new_tokens=CHAT_ANSWER, ignore_eos=True, kv_proof="lists").kv_proof
    body = {"model": "chat", "messages": messages, "max_tokens": CHAT_ANSWER, "ignore_eos": True}
    body["return_kv_proof"] = "lists"
    if stream:
        *_, answer = aggregated.stream("/v1/chat/completions", body)
    else:
        status, answer = aggregated.ask("/v1/chat/completions", body)
        assert status == 200, answer
    assert proof_in(answer) == plain(expected)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_at_a_stop_string_has_its_proof(client, stream, demo_engine, answers):
    prompt = "<record> lamp scarlet tiger lagos eight <query> lamp"
    expected = answers(prompt, 8, stop=["lagos"]).token_ids
    body = {**asked(prompt, "digest"), "stop": ["lagos"], "ignore_eos": False}
    if stream:
        events = list(client.stream("/v1/completions", body))
        answer, said = events[-1], "".join(event["choices"][0]["text"] for event in events)
    else:
        status, answer = client.ask("/v1/completions", body)
        assert status == 200, answer
        said = answer["choices"][0]["text"]
    assert said.strip() == "scarlet tiger"
    assert proof_in(answer)["answer_token_ids"] == list(expected)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["all", 3, ["lists"]])
def test_an_unknown_kind_of_proof_is_refused(client, kind, stream):
    status, answer = client.ask("/v1/completions", asked("lamp", kind, stream=stream))
    assert status == 400
    assert "expected digest or lists" in answer["error"]["message"]


def test_nothing_is_proven_that_nobody_asked_for(client, needle):
    answer = client.complete("demo", needle, max_tokens=2)
    assert "kv_proof" not in answer["choices"][0]["kvc"]


def test_without_the_option_a_proof_is_refused(demo_engine):
    one = Served(f"demo={demo_engine}", "--port", "0", "--threads", "1")
    for stream in (False, True):
        status, answer = one.client().ask("/v1/completions", asked("lamp", "digest", stream=stream))
        assert (status, "was not opened for proofs" in answer["error"]["message"]) == (400, True), answer
    assert one.end() == 0


def test_a_policy_that_has_no_proofs_is_not_served_with_them(tmp_path):
    engine = tmp_path / "full"
    assert run(["build", "--model", "retrieval-tiny", "--policy", "full", "--no-verify", "-o", str(engine)]) == 0
    one = Served(str(engine), "--port", "0", "--kv-proofs")
    assert one.process.wait(60) == one.end() == 2
    assert one.lines[0] == "error: KV proof: full compresses nothing in this engine, so there is nothing to prove"
