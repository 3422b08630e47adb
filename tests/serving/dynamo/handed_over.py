"""A prefill and a decode in one process, with memory that is copied as NIXL would."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json

from kvc_trt import Engine
from kvc_trt.contexts import packing_of
from kvc_trt.serving.dynamo.handoff.handing_over import Decode, Prefill


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


def asked(tokens, sampling=None, **stopping):
    return {"token_ids": tokens, "stop_conditions": stopping, "sampling_options": sampling or {}}


def after(message, chunk):
    """Return the message as decode receives it over the wire."""
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
