"""Prefill hands over to decode: answers go on as a local row's would, and a wrong offer is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvc_trt.errors import HandoffRefused
from kvc_trt.runtime import Sampling
from kvc_trt.serving.dynamo.handoff.handing_over import OFFER
from tests.serving.dynamo.handed_over import after, all_of, asked, pair_of, tokens_of, whole


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


@pytest.mark.one_in(2)
@pytest.mark.slow
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


@pytest.mark.slow
def test_the_context_of_another_engine_is_refused(pair, needle, demo_engine, tmp_path):
    """Workers of two engines should never meet; if they do, the refusal comes before a byte is read."""
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
