"""A real chat model behind `kvc-trt serve`: whole, and with prefill and decode apart."""

from __future__ import annotations

import pytest

from tests.serving.dynamo.served import ROOT, Served, eventually

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

LOG = (ROOT / "docs" / "demo" / "harbour-log.txt").read_text()
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": f"{LOG[:1500]}\n\nWhat was oiled and tested?"}],
]


@pytest.fixture(scope="module")
def engine(smollm2_gguf, tmp_path_factory):
    from kvc_trt.cli.main import run

    path = tmp_path_factory.mktemp("smollm2") / "chat"
    arguments = ["--policy", "rocketkv", "--token-budget", "64", "--max-input-len", "512", "--max-output-len", "64"]
    arguments += ["--weights", "fp32", "--no-verify", "-o", str(path)]
    assert run(["build", "--model", str(smollm2_gguf), *arguments]) == 0
    return path


@pytest.fixture(scope="module")
def alone(engine):
    """The answers without a server; the engine that gives them is closed before a server starts."""
    from kvc_trt import Engine

    with Engine.open(engine, threads=1) as opened:
        return [opened.chat(messages, max_new_tokens=20) for messages in CONVERSATIONS]


def check_answers(client, alone) -> list[dict]:
    found = []
    for messages, expected in zip(CONVERSATIONS, alone, strict=True):
        body = {"model": "chat", "messages": messages, "max_tokens": 20}
        status, answer = client.ask("/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"].strip() == expected.text.strip()
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
        assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
        found.append(answer["choices"][0]["kvc"])
    return found


@pytest.mark.exhaustive
def test_chats_are_answered_as_by_the_engine_alone(engine, alone):
    one = Served(str(engine), "--port", "0", "--threads", "1", "--rows", "2")
    client = one.client()
    check_answers(client, alone)
    body = {"model": "chat", "messages": CONVERSATIONS[0], "max_tokens": 20}
    pieces = [
        event["choices"][0]["delta"].get("content") or "" for event in client.stream("/v1/chat/completions", body)
    ]
    assert "".join(pieces).strip() == alone[0].text.strip() == "The capital of France is Paris."
    assert one.end() == 0


def test_chats_are_answered_so_with_prefill_and_decode_apart(engine, alone, tmp_path):
    parts = [Served("--role", "frontend", "--port", "0", "--store", str(tmp_path))]
    for role in ("prefill", "decode"):
        options = ["--role", role, "--store", str(tmp_path), "--threads", "1", "--rows", "2"]
        parts.append(Served(str(engine), *options))
    for part in parts[1:]:
        part.until("worker is ready")
    client = parts[0].client()
    eventually(lambda: client.ask("/health")[0] == 200, 60)
    kept = check_answers(client, alone)
    assert kept[1]["kept_tokens_per_cache"] < kept[1]["logical_tokens"]
    assert all(one["moved_bytes"] > 0 for one in kept)
    assert [part.end() for part in reversed(parts)] == [0, 0, 0]
