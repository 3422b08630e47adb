"""Answers of the light server: those of the engine alone, in the form of OpenAI's API."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvc_trt import Engine, Sampling
from kvc_trt.serving.asked import Asked
from kvc_trt.version import __version__
from tests.readable_model import text
from tests.serving.dynamo.served import LONG, eventually

RECORD = "<record> lamp scarlet tiger lagos eight <record> fork green horse cairo nine <query> lamp"
KNOWN = "<record> lamp scarlet tiger lagos eight <query> lamp"
"""Its words are all in the vocabulary."""
MESSAGES = [{"role": "user", "content": text(9, 10, 11)}]


def idle(client, model="demo"):
    return client.metric("kvc_trt_running", model=model) + client.metric("kvc_trt_waiting", model=model) == 0


def choice(client, prompt=RECORD, **more):
    return client.complete("demo", prompt, **more)["choices"][0]


def chat(client, **more):
    status, answer = client.ask("/v1/chat/completions", {"model": "chat", "messages": MESSAGES, **more})
    assert status == 200, answer
    return answer


def test_a_completion_is_the_answer_of_the_engine_alone(client, answers):
    answer, alone = client.complete("demo", RECORD, max_tokens=8), answers(RECORD, 8)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    (found,) = answer["choices"]
    kept = sum(alone.physical_lengths) / len(alone.physical_lengths)
    assert found == {
        "index": 0,
        "text": alone.text,
        "logprobs": None,
        "finish_reason": "stop",
        "kvc": {"logical_tokens": alone.logical_length, "kept_tokens_per_cache": round(kept, 1)},
    }
    read, drawn = len(alone.prompt_token_ids), len(alone.token_ids)
    assert answer["usage"] == {
        "prompt_tokens": read,
        "completion_tokens": drawn,
        "total_tokens": read + drawn,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_goes_through_the_template(client, chat_engine):
    with Engine.open(chat_engine, threads=1) as engine:
        alone = engine.chat(MESSAGES, max_new_tokens=6, ignore_eos=True)
    answer = chat(client, max_tokens=6, ignore_eos=True)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": alone.text, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(alone.prompt_token_ids)


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1, "seed": 5}, {"logprobs": 2}, {"echo": True}])
def test_a_stream_is_the_whole_answer_piece_by_piece(client, more):
    body = {"model": "demo", "prompt": RECORD, "max_tokens": 12, "ignore_eos": True, **more}
    events = list(client.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
    whole = client.ask("/v1/completions", body)[1]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert {event["usage"] for event in events[:-1] if event["usage"] is not None} == set()
    for expected in whole["choices"]:
        parts = [one for event in events for one in event["choices"] if one["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert parts[-1]["kvc"] == expected["kvc"]
        assert len(parts) >= 5
        if expected["logprobs"] is not None:
            found = [part["logprobs"] for part in parts if part["logprobs"] is not None]
            joined = {name: [one for part in found for one in part[name]] for name in expected["logprobs"]}
            assert joined == expected["logprobs"]


def test_a_streamed_chat_is_the_whole_answer(client):
    body = {"model": "chat", "messages": MESSAGES, "max_tokens": 6, "ignore_eos": True}
    events = list(client.stream("/v1/chat/completions", body))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    whole = chat(client, max_tokens=6, ignore_eos=True)["choices"][0]["message"]["content"]
    assert "".join(delta.get("content", "") for delta in deltas) == whole
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert "usage" not in events[-1]


def test_seeds_draw_the_tokens_that_the_engine_draws(client, answers):
    rules = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 11}
    answer = client.complete("demo", RECORD, max_tokens=12, ignore_eos=True, n=2, **rules)
    for index, found in enumerate(answer["choices"]):
        sampling = Sampling(**{**rules, "seed": 11 + index})
        assert found["text"] == answers(RECORD, 12, ignore_eos=True, sampling=sampling).text
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == len(answers(RECORD, 1).prompt_token_ids)


def test_several_prompts_have_their_answers_in_order(client, answers):
    prompts = [RECORD, RECORD.replace("query> lamp", "query> fork")]
    answer = client.complete("demo", prompts, max_tokens=8, n=2)
    texts = [answers(prompt, 8).text for prompt in prompts]
    assert [one["text"] for one in answer["choices"]] == [texts[0], texts[0], texts[1], texts[1]]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]


def test_completions_have_the_log_probabilities_of_their_tokens(client, answers):
    alone = answers(RECORD, 8, logprobs=2)
    found = choice(client, max_tokens=8, logprobs=2)
    spelled = found["logprobs"]
    assert "".join(spelled["tokens"]).strip() == found["text"]
    count = len(spelled["tokens"])
    assert count == len(alone.token_ids) - 1, "the token that ends the answer has no text"
    assert spelled["token_logprobs"] == pytest.approx([one.logprob for one in alone.logprobs[:count]], abs=1e-4)
    assert spelled["text_offset"] == [sum(map(len, spelled["tokens"][:index])) for index in range(count)]
    for token, best in zip(spelled["tokens"], spelled["top_logprobs"], strict=True):
        assert isinstance(best, dict)
        assert token in best
        assert 2 <= len(best) <= 3
    assert choice(client, max_tokens=8, logprobs=0)["logprobs"]["top_logprobs"] is None


def test_chats_have_the_log_probabilities_of_their_tokens(client):
    found = chat(client, max_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=2)["choices"][0]
    content = found["logprobs"]["content"]
    assert "".join(one["token"] for one in content).strip() == found["message"]["content"]
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 2 for one in content)
    assert [bytes(one["bytes"]).decode() for one in content] == [one["token"] for one in content]


def test_the_usage_is_equal_with_and_without_stop(client):
    plain = client.complete("demo", RECORD, max_tokens=8)
    assert client.complete("demo", RECORD, max_tokens=8, stop=["never said"])["usage"] == plain["usage"]
    stopped = client.complete("demo", RECORD, max_tokens=8, stop=["one", "two", "lagos", "three"])
    assert stopped["choices"][0]["text"].strip() == "scarlet tiger"
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert stopped["usage"]["completion_tokens"] == 3


def test_an_echo_puts_the_prompt_first(client, answers):
    """The answer's first word has a space before it, which it lacks alone."""
    assert choice(client, max_tokens=8, echo=True)["text"] == f"{RECORD} {answers(RECORD, 8).text}"


def test_a_compacted_prompt_says_what_it_kept(client, answers, demo_engine):
    with Engine.open(demo_engine) as engine:
        ids = engine.directory.tokenizer.encode(f"{RECORD} " * 60).ids
    answer, alone = choice(client, ids, max_tokens=4), answers(ids, 4)
    kept = sum(alone.physical_lengths) / len(alone.physical_lengths)
    assert answer["kvc"] == {"logical_tokens": alone.logical_length, "kept_tokens_per_cache": round(kept, 1)}
    assert kept < alone.logical_length


def test_a_full_batch_changes_no_answer(client, answers):
    prompts = [RECORD, RECORD.replace("lamp", "fork"), "<query> lamp", RECORD] * 3
    alone = [answers(prompt, 10, ignore_eos=True).text for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(choice, client, prompt, max_tokens=10, ignore_eos=True) for prompt in prompts]
        assert [one.result()["text"] for one in asked] == alone


def test_models_say_the_longest_prompt_and_context(client):
    status, models = client.ask("/v1/models")
    assert status == 200
    lengths = {one["id"]: (one["max_prompt_len"], one["max_model_len"]) for one in models["data"]}
    assert lengths["demo"] == (1024, 1024 + 8192)
    assert client.ask("/v1/models/demo")[1] == models["data"][0]
    status, refused = client.ask("/v1/models/nobody")
    assert (status, refused["error"]["code"]) == (404, "model_not_found")


def test_the_true_context_length_is_what_a_request_may_have(client):
    read, whole = 256, 288
    body = {"model": "chat", "prompt": [9] * read, "max_tokens": whole - read, "ignore_eos": True}
    status, answer = client.ask("/v1/completions", body)
    assert status == 200
    assert answer["choices"][0]["kvc"]["logical_tokens"] == whole - 1, "the last token is not fed"
    for wrong in ({"max_tokens": whole - read + 1}, {"prompt": [9] * (read + 1), "max_tokens": 1}):
        status, refused = client.ask("/v1/completions", {**body, **wrong})
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")


def test_tokenize_and_detokenize_agree_with_the_tokenizer(client, demo_engine):
    with Engine.open(demo_engine) as engine:
        ids = engine.directory.tokenizer.encode(KNOWN).ids
    status, found = client.ask("/tokenize", {"model": "demo", "prompt": KNOWN, "return_token_strs": True})
    assert status == 200
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 1024 + 8192)
    assert len(found["token_strs"]) == len(ids)
    status, back = client.ask("/detokenize", {"model": "demo", "tokens": ids[1:]})
    assert (status, back) == (200, {"prompt": KNOWN})


def test_tokenize_of_a_conversation_goes_through_the_template(client):
    status, found = client.ask("/tokenize", {"model": "chat", "messages": MESSAGES})
    assert (status, found["tokens"]) == (200, [3, 5, 9, 10, 11, 6])
    body = {"model": "chat", "messages": MESSAGES, "add_generation_prompt": False}
    assert client.ask("/tokenize", body)[1]["tokens"] == [3, 5, 9, 10, 11]


def test_the_version_endpoint_answers_the_packages_version(client):
    assert client.ask("/version") == (200, {"version": __version__})


def test_health_is_an_answer_of_every_engine(client):
    before = client.metric("kvc_trt_submitted_total", model="chat")
    assert client.ask("/health") == (200, {"status": "healthy", "models": {"demo": "answers", "chat": "answers"}})
    assert client.metric("kvc_trt_submitted_total", model="chat") == before + 1
    assert client.ask("/live") == (200, {"status": "live"})


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(client, chat_engine, stream):
    before = client.metric("kvc_trt_ended_total", model="demo", kind="cancelled")
    body = {"model": "demo", "prompt": [5] * 8, "max_tokens": LONG, "ignore_eos": True, "stream": stream}
    connection = client.open("/v1/completions", body)
    eventually(lambda: client.metric("kvc_trt_running", model="demo") == 1)
    connection.sock.close()
    connection.close()
    eventually(lambda: idle(client))
    assert client.metric("kvc_trt_ended_total", model="demo", kind="cancelled") == before + 1


def test_a_client_that_leaves_while_its_request_is_read_frees_its_row(client, monkeypatch):
    """Its template or its grammar takes a while; what is submitted afterwards ends at once."""
    reading, left, of = threading.Event(), threading.Event(), Asked.of

    def read_slowly(*arguments):
        reading.set()
        assert left.wait(60)
        return of(*arguments)

    monkeypatch.setattr(Asked, "of", read_slowly)
    before = client.metric("kvc_trt_ended_total", model="demo", kind="cancelled")
    body = {"model": "demo", "prompt": [5] * 8, "max_tokens": LONG, "ignore_eos": True}
    connection = client.open("/v1/completions", body)
    assert reading.wait(60)
    connection.sock.close()
    connection.close()
    time.sleep(0.1)  # the server sees it, most likely; if not, the row is free all the same
    left.set()
    eventually(lambda: client.metric("kvc_trt_ended_total", model="demo", kind="cancelled") == before + 1)
    eventually(lambda: idle(client))


def test_pages_of_an_allowed_origin_may_ask(served):
    import http.client

    def asked(method: str, origin: str, **more: str) -> dict[str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        connection.request(method, "/v1/models", headers={"Origin": origin, **more})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return {"status": str(answer.status), **{name.lower(): value for name, value in answer.getheaders()}}

    wanted = {"Access-Control-Request-Method": "POST"}
    assert asked("GET", "https://page.example")["access-control-allow-origin"] == "https://page.example"
    assert asked("OPTIONS", "https://page.example", **wanted)["status"] == "204"
    assert "access-control-allow-origin" not in asked("GET", "https://other.example")
    assert asked("OPTIONS", "https://other.example", **wanted)["status"] == "405"


def test_the_openai_client_reads_answers_and_streams(openai):
    assert [model.id for model in openai.models.list()] == ["demo", "chat"]
    assert openai.completions.create(model="demo", prompt=RECORD).choices[0].text.strip() == "scarlet tiger lagos eight"
    asked = {"model": "chat", "messages": MESSAGES, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    whole = openai.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=2)
    assert len(whole.choices) == 2
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 5
    with openai.chat.completions.stream(**asked) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == streamed


def test_the_openai_client_raises_its_own_errors(openai):
    from openai import BadRequestError, NotFoundError

    with pytest.raises(BadRequestError, match="store is not supported, found True: no answers are stored") as raised:
        openai.chat.completions.create(model="chat", messages=MESSAGES, store=True)
    assert raised.value.param == "store"
    with pytest.raises(NotFoundError, match="there is no model 'nobody' here, expected chat, demo"):
        openai.chat.completions.create(model="nobody", messages=MESSAGES)


def test_a_response_is_plain_json(client):
    assert json.loads(json.dumps(chat(client, max_tokens=1))) is not None


@pytest.mark.parametrize(("given", "priority"), [({}, 0), ({"priority": -2}, 2), ({"priority": 7}, -7)])
def test_the_lowest_priority_joins_first(served, monkeypatch, given, priority):
    model, engine = served.models.served["demo"]
    seen, submit = [], engine._scheduler.submit
    monkeypatch.setattr(
        engine._scheduler, "submit", lambda *args, **settings: seen.append(settings) or submit(*args, **settings)
    )
    body = {"model": model.name, "prompt": [5, 6, 7], "max_tokens": 1, **given}
    assert served.client().ask("/v1/completions", body)[0] == 200
    assert [one["priority"] for one in seen] == [priority]
