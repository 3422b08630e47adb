"""Proofs of the kept tokens, with prefill and decode apart: the owner of each part, and refused records."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvc_trt import Engine
from kvc_trt.errors import HandoffRefused, InputError
from kvc_trt.proof import document_of
from kvc_trt.runtime import Request
from kvc_trt.serving.dynamo.handoff.handing_over import OFFER
from kvc_trt.serving.dynamo.wire import message_of
from tests.serving.dynamo.handed_over import all_of, asked, pair_of, whole


@pytest.fixture(scope="module")
def opened_for_proofs(demo_engine):
    with pair_of(demo_engine, proofs=True) as made:
        yield made


@pytest.fixture
def proving(opened_for_proofs):
    yield opened_for_proofs
    prefill, _ = opened_for_proofs
    prefill.slots.release([*prefill.slots._held])  # nobody watches for their readers


def proven(message, kind):
    """Return the gateway's message for the same request with a proof."""
    longest, ignoring = message["stop_conditions"]["max_tokens"], message["stop_conditions"].get("ignore_eos", False)
    request = Request(message["token_ids"], longest, ignore_eos=ignoring, kv_proof=kind)
    return {**message, "annotations": message_of(request, "demo")["nvext"]["annotations"]}


def proof_in(chunks):
    return chunks[-1]["engine_data"]["kvc"]["output"]["kv_proof"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_a_proof_is_that_of_one_process(proving, demo_engine, needle, kind):
    """The proof has the entries that prefill kept of the prompt, and those that decode has read."""
    chunks = asyncio.run(whole(proving, proven(asked(needle, max_tokens=6, ignore_eos=True), kind)))
    assert all("output" not in chunk["engine_data"]["kvc"] for chunk in chunks[:-1])
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
