"""A served engine: the answers of `kvc-trt run`, and errors that a stranger may read."""

from __future__ import annotations

import asyncio
import logging
import shutil

import pytest

import kvc_trt
from kvc_trt.errors import InputError
from kvc_trt.serving import ServedEngine, ServingError, parse_request
from kvc_trt.serving.engine import ServingSettings

LAMP = "<record> lamp scarlet tiger lagos eight <query> lamp"
ANSWER = "scarlet tiger lagos eight"


@pytest.fixture(scope="module")
def served(retrieval_engine):
    one = ServedEngine.open(retrieval_engine, ServingSettings(rows=2, queue_limit=4))
    yield one
    one.close()


def ask(served, **fields):
    return served.submit(parse_request({"text_input": LAMP, **fields}))


async def pieces_of(answer):
    return [piece async for piece in answer.pieces()]


def test_pieces_lose_no_space_and_make_the_whole(served):
    pieces = asyncio.run(pieces_of(ask(served)))
    whole = asyncio.run(ask(served).whole())
    assert [piece.text for piece in pieces] == ["scarlet", " tiger", " lagos", " eight", ""]
    assert whole.text == "".join(piece.text for piece in pieces) == ANSWER
    assert whole.token_ids == tuple(token for piece in pieces for token in piece.token_ids)
    assert [piece.end for piece in pieces[:-1]] == [None] * 4
    assert whole.end == pieces[-1].end


def test_the_end_says_what_was_counted(served, retrieval_engine):
    filler = "amber " * 300
    answer = served.submit(parse_request({"text_input": filler + LAMP, "max_tokens": 3}))
    whole = asyncio.run(answer.whole())
    output = kvc_trt.Engine.open(retrieval_engine).generate(filler + LAMP, max_new_tokens=3)
    assert whole.token_ids == output.token_ids
    assert answer.input_tokens == len(output.prompt_token_ids)
    assert (whole.end.finish_reason, whole.end.output_tokens, whole.end.reused_tokens) == ("length", 3, 0)
    assert whole.end.kept_tokens == sum(output.physical_lengths)
    assert whole.end.logical_tokens == output.logical_length * len(output.physical_lengths) > whole.end.kept_tokens


def test_the_prompt_goes_before_the_answer_where_it_is_asked_for(served):
    assert asyncio.run(ask(served, exclude_input_in_output=False).whole()).text == LAMP + ANSWER
    first, *others = asyncio.run(pieces_of(ask(served, exclude_input_in_output=False)))
    assert (first.text, "".join(piece.text for piece in others)) == (LAMP + "scarlet", " tiger lagos eight")


def test_probabilities_come_with_their_tokens(served):
    whole = asyncio.run(ask(served, return_log_probs=True).whole())
    assert len(whole.logprobs) == len(whole.token_ids)
    assert all(-0.1 < one <= 0 for one in whole.logprobs), "the model knows the answer"
    assert asyncio.run(ask(served).whole()).logprobs is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 10**6}, "max_tokens is 1000000, and the engine has positions for 2112 tokens in all"),
        ({"text_input": "lamp " * 3000}, "prompt has 3001 tokens, expected at most 2048"),
        ({"text_input": "x" * (2048 * 1024 + 1)}, "the prompt has 2097153 characters, expected at most 2048 tokens"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens must be from 0 to 5"),
        ({"text_input": None, "input_ids": [99999]}, "token 0 is 99999, expected an id from 0 to"),
    ],
)
def test_impossible_requests_are_refused_at_once(served, fields, message):
    with pytest.raises(ServingError, match=message) as refused:
        ask(served, **fields)
    assert refused.value.reason == "invalid"


def test_a_full_queue_is_busy_and_a_cancelled_answer_frees_its_row(served):
    endless = {"ignore_eos": True, "max_tokens": 2000}
    answers = []

    def ask_for_ever():
        for _ in range(2 + 4 + 2):  # rows, queue, what is being read, and one too many
            answers.append(ask(served, **endless))

    with pytest.raises(ServingError) as refused:
        ask_for_ever()
    assert refused.value.reason == "busy"
    for answer in answers:
        answer.cancel()
    with pytest.raises(ServingError) as ended:
        asyncio.run(answers[0].whole())
    assert ended.value.reason == "cancelled"
    assert asyncio.run(ask(served).whole()).text == ANSWER


def test_a_reader_that_leaves_ends_its_answer(served):
    async def leave():
        pieces = ask(served, ignore_eos=True, max_tokens=2000).pieces()
        await anext(pieces)
        await pieces.aclose()

    before = served.metrics()["ended"].get("cancelled", 0)
    asyncio.run(leave())
    assert asyncio.run(ask(served).whole()).text == ANSWER
    assert served.metrics()["ended"]["cancelled"] == before + 1


def test_a_look_at_its_health_that_is_given_up_ends_its_request(served):
    """No thread waits for its answer, which may be far behind others."""

    async def give_up():
        answers = [ask(served, ignore_eos=True, max_tokens=2000) for _ in range(2)]
        submitted = served.metrics()["submitted"]
        looking = asyncio.create_task(served.answers())
        while served.metrics()["submitted"] == submitted:
            await asyncio.sleep(0.001)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        for answer in answers:
            answer.cancel()

    before = served.metrics()["ended"].get("cancelled", 0)
    asyncio.run(give_up())
    assert asyncio.run(ask(served).whole()).text == ANSWER
    assert served.metrics()["ended"]["cancelled"] == before + 3


def test_a_deadline_in_the_past_is_too_late(served):
    with pytest.raises(ServingError) as refused:
        served.submit(parse_request({"text_input": LAMP}), seconds=-1.0)
    assert refused.value.reason == "too late"


def test_an_engine_that_cannot_answer_says_so_at_once(served, retrieval_engine):
    served.answer_once()
    cramped = ServedEngine.open(retrieval_engine, ServingSettings(memory_bytes=1000))
    with pytest.raises(ServingError, match="expected at most 1000 B"):
        cramped.answer_once()
    cramped.close()


def test_internal_failures_go_to_the_log_alone(retrieval_engine, caplog, monkeypatch):
    served = ServedEngine.open(retrieval_engine)

    def broken(*_):
        raise RuntimeError("/secret/path")
        yield

    monkeypatch.setattr(served._scheduler.session, "add_in_slices", broken)
    with caplog.at_level(logging.ERROR, "kvc_trt.serving"), pytest.raises(ServingError) as failed:
        asyncio.run(ask(served).whole())
    served.close()
    assert (failed.value.reason, "secret" in failed.value.message) == ("failed", False)
    assert "/secret/path" in caplog.text


def test_an_engine_without_a_tokenizer_takes_token_ids(tiny_engine):
    served = ServedEngine.open(tiny_engine)
    whole = asyncio.run(served.submit(parse_request({"input_ids": [5, 6, 7], "max_tokens": 4})).whole())
    assert (whole.text, len(whole.token_ids)) == ("", 4)
    for fields, message in (
        ({"text_input": "x"}, "give input_ids"),
        ({"input_ids": [5], "stop_words": "x"}, "stop_token_ids"),
    ):
        with pytest.raises(ServingError, match=message):
            served.submit(parse_request(fields))
    served.close()


def test_another_engine_is_refused_before_anything_runs(retrieval_engine, tmp_path):
    with pytest.raises(InputError, match=r"another engine .* expected 00"):
        ServedEngine.open(retrieval_engine, digest="00")
    changed = tmp_path / "changed"
    shutil.copytree(retrieval_engine, changed)
    weights = changed / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(InputError, match=r"weights\.safetensors"):
        ServedEngine.open(changed)


def test_closing_with_drain_answers_all_requests(retrieval_engine):
    served = ServedEngine.open(retrieval_engine, ServingSettings(rows=1))
    answers = [ask(served) for _ in range(3)]
    served.close(drain=True)
    assert [asyncio.run(answer.whole()).text for answer in answers] == [ANSWER] * 3
