"""A request as its caller follows it: from threads, from asyncio loops, with a timeout."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from tests.runtime.scheduling import finish, scheduler, tokens_alone
from tests.runtime.slicing_executor import FakeSlicingExecutor


def test_threads_share_one_scheduler():
    session = Session(FakeSlicingExecutor(), None, 3)
    requests = [Request([i % 40] * (1 + i % 30), max_new_tokens=1 + i % 8) for i in range(24)]
    found = {}
    with Scheduler(session, queue_limit=30) as one:

        def ask(i):
            found[i] = [event.token_id for event in one.submit(requests[i])]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert session.executor.prepared == 1
    assert [tuple(found[i]) for i in range(len(requests))] == [tokens_alone(request) for request in requests]


def test_asyncio_callers_follow_their_requests():
    async def ask(one, request):
        return [event.token_id async for event in one.stream(request)]

    async def all_of(one, requests):
        tickets = [one.submit(request) for request in requests]
        streamed = await asyncio.gather(*(ask(one, request) for request in requests))
        return streamed, [await ticket.answer() for ticket in tickets]

    requests = [Request([i] * (i + 1), max_new_tokens=6) for i in range(6)]
    with Scheduler(Session(FakeSlicingExecutor(), None, 3)) as one:
        streamed, outputs = asyncio.run(all_of(one, requests))
    expected = [tokens_alone(request) for request in requests]
    assert [tuple(ids) for ids in streamed] == expected
    assert [output.token_ids for output in outputs] == expected


def test_a_stream_that_is_left_ends_its_request():
    async def leave(one):
        events = one.stream(Request([1], max_new_tokens=10))
        async for _ in events:
            break
        await events.aclose()
        await one.submit(Request([2], max_new_tokens=2)).answer()

    with Scheduler(Session(FakeSlicingExecutor(), None, 1)) as one:
        asyncio.run(leave(one))
    ended = one.metrics()["ended"]
    assert ended["length"] + ended.get("cancelled", 0) == 2


def test_waiting_with_a_timeout_leaves_the_request_running():
    one = scheduler()
    ticket = one.submit(Request([1], max_new_tokens=2))
    with pytest.raises(TimeoutError):
        ticket.result(0)
    finish(one)
    assert len(ticket.result(0).token_ids) == 2


def test_a_loop_is_woken_once_for_the_rows_of_a_step():
    woken, rows = [], 8

    async def follow(one):
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *called: (woken.append(called), call_soon(*called))[1]
        tickets = [one.submit(Request([row + 1], max_new_tokens=3)) for row in range(rows)]
        followers = [asyncio.create_task(ticket.answer()) for ticket in tickets]
        await asyncio.sleep(0)  # all of them listen
        finish(one)  # the loop waits meanwhile: a wake-up for each event would pile up
        return [output.token_ids for output in await asyncio.gather(*followers)]

    found = asyncio.run(follow(scheduler(rows=rows)))
    assert found == [tokens_alone(Request([row + 1], max_new_tokens=3)) for row in range(rows)]
    assert len(woken) == 1
