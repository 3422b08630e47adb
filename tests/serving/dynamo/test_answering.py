"""Messages of the frontend through a scheduler over a fake executor: chunks, ends, and cancellations."""

from __future__ import annotations

import asyncio

import pytest

from kvc_trt.errors import Busy, Cancelled, InputError
from kvc_trt.runtime import Request, Scheduler, Session
from kvc_trt.serving.dynamo.whole_engine import WholeEngine
from tests.runtime.fake_executor import FakeExecutor


def asked(tokens, **stopping):
    return {"token_ids": tokens, "stop_conditions": stopping}


async def chunks_of(answering, message, identity="one"):
    return [chunk async for chunk in answering.answer(message, identity)]


@pytest.fixture
def answering():
    scheduler = Scheduler(Session(FakeExecutor(), None, 2), queue_limit=1)
    scheduler.start()
    yield WholeEngine(scheduler, (1,))
    scheduler.close()


def test_an_answer_is_a_chunk_per_token_and_ends_with_a_reason(answering):
    alone = Session(FakeExecutor(), None, 1).generate([Request([1, 4, 5], max_new_tokens=3)])[0]
    chunks = asyncio.run(chunks_of(answering, asked([4, 5], max_tokens=3)))
    assert [token for chunk in chunks for token in chunk["token_ids"]] == list(alone.token_ids)
    assert [chunk.get("finish_reason") for chunk in chunks] == [None, None, "length"]
    assert chunks[-1]["completion_usage"]["prompt_tokens"] == 3
    assert chunks[-1]["engine_data"]["kvc"]["logical_tokens"] == alone.logical_length
    assert answering.is_quiescent


def test_a_request_that_is_cancelled_ends_and_leaves_nothing(answering):
    async def story():
        following = asyncio.create_task(chunks_of(answering, asked([4], ignore_eos=True)))
        while answering.is_quiescent:
            await asyncio.sleep(0)
        answering.cancel("one")
        answering.cancel("nobody")
        with pytest.raises(Cancelled):
            await following

    asyncio.run(story())
    assert answering.is_quiescent


def test_a_generator_that_is_closed_ends_its_request(answering):
    async def story():
        chunks = answering.answer(asked([4], ignore_eos=True), "one")
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(story())
    assert answering.is_quiescent


def test_refusals_come_before_the_first_chunk(answering):
    with pytest.raises(InputError, match="max_tokens"):
        asyncio.run(chunks_of(answering, asked([4], max_tokens=10**9)))
    answering.close()
    with pytest.raises(Busy):
        asyncio.run(chunks_of(answering, asked([4])))
    assert answering.is_quiescent
