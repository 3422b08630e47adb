"""The memory of a handoff: when it is given back, and to whom it is not."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from kvc_trt.contexts.handoff import write_handoff
from kvc_trt.errors import Busy, Cancelled, HandoffRefused, InputError
from kvc_trt.serving.dynamo.handoff import handing_over
from tests.serving.dynamo.handed_over import all_of, asked, tokens_of, whole

pytestmark = pytest.mark.slow


def test_memory_is_given_back_once_it_was_read(pair, needle):
    prefill, decode = pair

    async def story():
        watching = asyncio.create_task(prefill.watch())
        for _ in range(5):
            await whole(pair, asked(needle, max_tokens=2))
        while not prefill.is_quiescent:
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(story())
    assert prefill.figures()["handoffs"] == decode.figures()["handoffs"] == 5
    assert decode.slots.all_free


def test_prefill_waits_for_memory_and_then_says_that_it_is_busy(pair, needle, monkeypatch):
    monkeypatch.setattr(handing_over, "SLOT_SECONDS", 0.1)
    prefill, _ = pair

    async def story():
        message = asked(needle, max_tokens=1)
        for name in ("a", "b"):
            await all_of(prefill.answer(message, name))
        with pytest.raises(Busy, match="no memory"):
            await all_of(prefill.answer(message, "c"))

    asyncio.run(story())
    assert prefill.slots.held == 2
    assert not prefill.is_quiescent


@pytest.mark.parametrize("message", [asked([5000], max_tokens=1), asked([], max_tokens=1), asked([5] * 2000)])
def test_a_prompt_that_is_refused_holds_no_memory(pair, message):
    prefill, _ = pair
    with contextlib.suppress(InputError):
        asyncio.run(all_of(prefill.answer(message, "p")))
        assert message["token_ids"] == [], "a start token alone is a prompt"
    assert prefill.slots.free + prefill.slots.held == 2
    assert prefill.slots.held == (message["token_ids"] == [])


def test_a_request_that_is_cancelled_in_prefill_holds_no_memory(pair, needle):
    prefill, _ = pair

    async def story():
        going = asyncio.create_task(all_of(prefill.answer(asked(needle, max_tokens=1), "p")))
        while not prefill._tickets:
            await asyncio.sleep(0)
        prefill.cancel("p")
        with pytest.raises(Cancelled):
            await going

    asyncio.run(story())
    assert prefill.slots.all_free


def test_a_write_that_nobody_waits_for_keeps_its_memory_until_it_is_done(pair, needle, monkeypatch):
    """Otherwise another handoff would be written into the same piece."""
    prefill, _ = pair
    begun, go_on = threading.Event(), threading.Event()

    def slow(context, packing, into):
        begun.set()
        go_on.wait(10)
        return write_handoff(context, packing, into)

    monkeypatch.setattr(handing_over, "write_handoff", slow)

    async def story():
        going = asyncio.create_task(all_of(prefill.answer(asked(needle, max_tokens=1), "p")))
        await asyncio.to_thread(begun.wait, 10)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        assert prefill.slots.free == 1
        go_on.set()
        while not prefill.slots.all_free:
            await asyncio.sleep(0.01)

    asyncio.run(story())


def test_memory_comes_back_although_nixl_fails(pair, needle, monkeypatch, caplog):
    """A reader that dies must not end the loop that gives memory back."""
    prefill, _ = pair
    prefill.slots._clock = clock = iter(range(0, 10_000, 20)).__next__
    assert clock() == 0
    failures = 0

    def broken():
        nonlocal failures
        failures += 1
        raise RuntimeError("nixlRemoteDisconnectError")

    monkeypatch.setattr(prefill.transfers, "finished", broken)

    async def story():
        await all_of(prefill.answer(asked(needle, max_tokens=1), "p"))
        assert prefill.slots.held == 1
        watching = asyncio.create_task(prefill.watch())
        while not prefill.slots.all_free:
            await asyncio.sleep(0.01)
        assert not watching.done()
        watching.cancel()

    asyncio.run(story())
    assert failures > 1
    assert caplog.text.count("NIXL does not say what was read") == 1


def test_a_transfer_that_does_not_end_holds_its_memory_and_not_the_client(pair, needle, monkeypatch):
    """The client gets its answer in time; the piece of memory is free only when nothing can write there any more."""
    monkeypatch.setattr(handing_over, "GIVE_UP_SECONDS", 0.05)
    _, decode = pair

    async def story():
        ends = asyncio.Event()
        at_once = decode.transfers.fetch

        async def slow(offer, into):
            await ends.wait()
            await at_once(offer, into)

        monkeypatch.setattr(decode.transfers, "fetch", slow)
        with pytest.raises(HandoffRefused, match="was not read within"):
            await whole(pair, asked(needle, max_tokens=2))
        assert decode.slots.free == 1
        assert decode.figures()["handoffs_refused"] == 1
        ends.set()
        while not decode.slots.all_free:
            await asyncio.sleep(0.01)
        assert len(tokens_of(await whole(pair, asked(needle, max_tokens=2)))) == 2

    asyncio.run(story())


def test_a_client_that_leaves_during_a_transfer_frees_no_memory_that_is_written(pair, needle, monkeypatch):
    _, decode = pair

    async def story():
        begun, ends = asyncio.Event(), asyncio.Event()

        async def slow(offer, into):
            begun.set()
            await ends.wait()
            raise HandoffRefused("too late")

        monkeypatch.setattr(decode.transfers, "fetch", slow)
        going = asyncio.create_task(whole(pair, asked(needle, max_tokens=2)))
        await begun.wait()
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        assert decode.slots.free == 1
        ends.set()
        while not decode.slots.all_free:
            await asyncio.sleep(0.01)

    asyncio.run(story())
