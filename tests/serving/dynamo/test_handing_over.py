"""Prefill and decode in one process, with memory that is copied as NIXL would: what is handed over, and what is not."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import threading

import numpy as np
import pytest

from kvc_trt import Engine
from kvc_trt.contexts import packing_of
from kvc_trt.contexts.handoff import write_handoff
from kvc_trt.errors import Busy, Cancelled, HandoffRefused, InputError
from kvc_trt.proof import document_of
from kvc_trt.runtime import Sampling
from kvc_trt.serving.dynamo import handing_over
from kvc_trt.serving.dynamo.handing_over import OFFER, Decode, Prefill


class Copied:
    """Transfers within one process."""

    def __init__(self, arena) -> None:
        self.agent, self.arrived, self.fetched = "abcd", [], 0

    def finished(self):
        arrived, self.arrived[:] = list(self.arrived), []
        return arrived

    async def fetch(self, offer, into):
        await asyncio.sleep(0)
        self.fetched += 1
        ctypes.memmove(into.ctypes.data, offer.address, offer.handoff.nbytes)
        self.peer.arrived.append(offer.tag)


@contextlib.contextmanager
def pair_of(engine_path, **options):
    """A prefill and a decode, each with two rows, and so two pieces of memory."""
    with contextlib.ExitStack() as stack:
        made = []
        for kind in (Prefill, Decode):
            engine = Engine.open(engine_path, threads=1, **options)
            scheduler = stack.enter_context(engine.scheduler(2))
            made.append(kind(scheduler, (1,), packing_of(engine.directory), Copied))
        made[1].transfers.peer = made[0].transfers
        yield made


@pytest.fixture
def pair(demo_engine):
    with pair_of(demo_engine) as made:
        yield made


@pytest.fixture(scope="module")
def opened_for_proofs(demo_engine):
    with pair_of(demo_engine, proofs=True) as made:
        yield made


@pytest.fixture
def proving(opened_for_proofs):
    yield opened_for_proofs
    prefill, _ = opened_for_proofs
    prefill.slots.release([*prefill.slots._held])  # nobody watches for their readers


def asked(tokens, sampling=None, **stopping):
    return {"token_ids": tokens, "stop_conditions": stopping, "sampling_options": sampling or {}}


def after(message, chunk):
    """The same message as decode gets it, over the wire."""
    params = json.loads(json.dumps(chunk["disaggregated_params"]))
    return {**message, "prefill_result": {"disaggregated_params": params}}


async def all_of(chunks):
    return [chunk async for chunk in chunks]


async def whole(pair, message, change=lambda message: message):
    prefill, decode = pair
    (offered,) = await all_of(prefill.answer({**message, "stop_conditions": {"max_tokens": 1}}, "p"))
    assert offered["finish_reason"] == "length"
    return await all_of(decode.answer(change(after(message, offered)), "d"))


def tokens_of(chunks):
    return [token for chunk in chunks for token in chunk["token_ids"]]


def test_decode_goes_on_as_a_local_row_would(pair, answers, needle):
    rules = {"temperature": 1.2, "seed": 4, "repetition_penalty": 1.2}
    message = asked(needle, rules, max_tokens=12, ignore_eos=True)
    chunks = asyncio.run(whole(pair, message))
    alone = answers(needle, 12, ignore_eos=True, sampling=Sampling(**rules))
    assert tokens_of(chunks) == list(alone.token_ids)
    assert chunks[-1]["completion_usage"]["prompt_tokens"] == len(needle)
    assert chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prefill, decode = pair
    assert chunks[-1]["engine_data"]["kvc"]["moved_bytes"] == prefill.moved_bytes == decode.moved_bytes > 0
    assert decode.figures()["prompt_tokens"] == 0, "it has read no prompt"


def proven(message, kind):
    return {**message, "annotations": [f"kvc-trt.kv_proof.{kind}"]}


def proof_in(chunks):
    return chunks[-1]["engine_data"]["kvc"]["kv_proof"]


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_a_proof_is_that_of_one_process(proving, demo_engine, needle, kind):
    """It has what prefill kept of the prompt, and what decode has read."""
    chunks = asyncio.run(whole(proving, proven(asked(needle, max_tokens=6, ignore_eos=True), kind)))
    assert all("engine_data" not in chunk for chunk in chunks[:-1])
    engine = Engine.open(demo_engine, threads=1, proofs=True)
    alone = engine.generate(needle, max_new_tokens=6, ignore_eos=True, kv_proof=kind)
    assert proof_in(chunks) == json.loads(json.dumps(document_of(alone.kv_proof)))


def test_nothing_is_proven_that_nobody_asked_for(proving, needle):
    chunks = asyncio.run(whole(proving, asked(needle, max_tokens=2)))
    assert "kv_proof" not in chunks[-1]["engine_data"]["kvc"]


def without_record(message):
    del message["prefill_result"]["disaggregated_params"][OFFER]["kv_proof"]
    return message


def with_record(**change):
    def edit(message):
        message["prefill_result"]["disaggregated_params"][OFFER]["kv_proof"].update(change)
        return message

    return edit


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (without_record, HandoffRefused, "does not say what was kept"),
        (with_record(caches=[{"cache": 0, "kept": "x", "read": []}]), HandoffRefused, "kv_proof"),
        (with_record(caches=[{"cache": 0, "kept": "0" * 64, "read": ["0" * 64]}]), HandoffRefused, "digests of steps"),
        (with_record(more=1), HandoffRefused, "unknown key"),
        (with_record(kind="lists"), HandoffRefused, "expected lists"),
        (with_record(kind="lists", caches=[]), InputError, "kind digest cannot go on from a record of lists"),
    ],
)
def test_a_record_of_the_prompt_that_is_wrong_is_refused(proving, needle, change, error, said):
    _, decode = proving
    with pytest.raises(error, match=said):
        asyncio.run(whole(proving, proven(asked(needle, max_tokens=2), "digest"), change))
    assert decode.slots.all_free


def test_without_proofs_a_request_for_one_is_refused_by_either(pair, needle):
    for one in pair:
        with pytest.raises(InputError, match="was not opened for proofs"):
            asyncio.run(all_of(one.answer_whole(proven(asked(needle, max_tokens=1), "digest"), "p")))


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
    """Whoever asked is told in time; the piece is free only when nothing can be written there any more."""
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


def test_decode_reads_no_prompt_itself(pair, needle):
    _, decode = pair
    for message in (asked(needle), {**asked(needle), "prefill_result": {"disaggregated_params": {}}}):
        with pytest.raises(HandoffRefused, match="no handoff came"):
            asyncio.run(all_of(decode.answer(message, "d")))
    assert decode.figures()["handoffs_refused"] == 2
    assert decode.figures()["submitted"] == 0


def edited(**change):
    def edit(message):
        message["prefill_result"]["disaggregated_params"][OFFER].update(change)
        return message

    return edit


def edited_handoff(**change):
    def edit(message):
        message["prefill_result"]["disaggregated_params"][OFFER]["handoff"].update(change)
        return message

    return edit


def of_another_text(message):
    return {**message, "token_ids": [*message["token_ids"][:-1], 7]}


@pytest.mark.parametrize(
    ("change", "said", "fetched"),
    [
        (edited(version=2), "version", 0),
        (edited(tag="../../etc"), "tag", 0),
        (edited(address=-1), "address", 0),
        (edited(more=1), "unknown key", 0),
        (edited_handoff(nbytes=8), "has 8 bytes", 0),
        (edited_handoff(context={}), "missing key", 0),
        (of_another_text, "another text", 0),
        (edited_handoff(checksum="0" * 64), "another checksum", 1),
    ],
)
def test_an_offer_that_is_wrong_is_refused(pair, needle, change, said, fetched):
    _, decode = pair
    with pytest.raises(HandoffRefused, match=said):
        asyncio.run(whole(pair, asked(needle, max_tokens=2), change))
    assert decode.transfers.fetched == fetched
    assert decode.slots.all_free
    assert decode.is_quiescent


def test_no_two_offers_have_one_tag(pair):
    prefill, _ = pair
    offers = [asyncio.run(all_of(prefill.answer(asked([4, 5], max_tokens=1), name)))[0] for name in ("a", "b")]
    tags = {one["disaggregated_params"][OFFER]["tag"] for one in offers}
    assert len(tags) == 2
    assert all(len(tag) == 32 for tag in tags)


def test_the_context_of_another_engine_is_refused(pair, needle, demo_engine, tmp_path):
    """Workers of two engines never meet; whoever lets them meet is told so before a byte is read."""
    from kvc_trt.cli.main import run

    other = tmp_path / "other"
    settings = ["--token-budget", "32", "--max-input-len", "1024", "--max-output-len", "512", "--no-verify"]
    assert run(["build", "--model", "retrieval-tiny", "--policy", "rocketkv", *settings, "-o", str(other)]) == 0
    prefill, _ = pair
    with pair_of(other) as (_, decode):
        decode.transfers.peer = prefill.transfers
        with pytest.raises(HandoffRefused, match="made under policy rocketkv"):
            asyncio.run(whole((prefill, decode), asked(needle, max_tokens=2)))
        assert decode.transfers.fetched == 0


def test_an_offer_is_used_once(pair, needle):
    prefill, decode = pair

    async def story():
        message = asked(needle, max_tokens=2)
        (offered,) = await all_of(prefill.answer(message, "p"))
        await all_of(decode.answer(after(message, offered), "d"))
        with pytest.raises(HandoffRefused, match="used before"):
            await all_of(decode.answer(after(message, offered), "e"))

    asyncio.run(story())


def test_memory_that_was_used_again_has_another_checksum(pair, needle):
    prefill, decode = pair

    async def story():
        message = asked(needle, max_tokens=2)
        (offered,) = await all_of(prefill.answer(message, "p"))
        prefill.slots.arena[:] = np.random.default_rng(0).integers(0, 255, prefill.slots.arena.shape, np.uint8)
        with pytest.raises(HandoffRefused, match="overwritten"):
            await all_of(decode.answer(after(message, offered), "d"))

    asyncio.run(story())


def test_a_probe_is_answered_whole_by_either(pair):
    for one in pair:
        chunks = asyncio.run(all_of(one.answer_whole(asked([4, 5], max_tokens=1), "probe")))
        assert chunks[-1]["finish_reason"] == "length"
