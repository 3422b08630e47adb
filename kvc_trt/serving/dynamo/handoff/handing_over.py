"""Prefill and decode on different machines: one reads and compacts prompts, the other answers from their contexts.

A handoff is a compressed context with the logits of the prompt's last token: the decode worker samples from them as a
local row would, with the same seed. If a handoff fails, it is refused; the prompt is never silently read again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from typing_extensions import override

from kvc_trt.contexts.handoff import Bytes, check_handoff, largest_handoff, read_handoff, write_handoff
from kvc_trt.contexts.packing import RowPacking
from kvc_trt.errors import Busy, HandoffRefused, InputError
from kvc_trt.proof import PromptRecord
from kvc_trt.proof.file import prompt_document_of, prompt_record_of
from kvc_trt.runtime import Context, Scheduler
from kvc_trt.serving.dynamo.chunks import Chunk, chunk_of
from kvc_trt.serving.dynamo.handoff.slots import Slots
from kvc_trt.serving.dynamo.handoff.transfer import FETCH_SECONDS, LOOK_AGAIN_SECONDS, Offer, Transfers
from kvc_trt.serving.dynamo.requests import prompt_of, request_of
from kvc_trt.serving.dynamo.whole_engine import WholeEngine
from kvc_trt.serving.dynamo.wire import is_ours
from kvc_trt.validation import validated

log = logging.getLogger("kvc_trt.serving")

OFFER = "kvc"
"""The key of an offer in Dynamo's `disaggregated_params`."""
IDLE_SECONDS = 0.05
SLOT_SECONDS = 10.0
"""The time that a request waits for a free slot."""
GIVE_UP_SECONDS = FETCH_SECONDS + 2
"""The time that a request waits for its context: longer than the transfer itself may take."""
REMEMBERED = 4096
"""The number of latest offers that a decode worker remembers, so that none is used twice."""

MakeTransfers = Callable[[Bytes], Transfers]


class HandingOver(WholeEngine):
    """The shared part of prefill and decode workers: slots of memory, and the transfers between them."""

    def __init__(
        self, scheduler: Scheduler, start_tokens: Sequence[int], packing: RowPacking, transfers: MakeTransfers
    ) -> None:
        super().__init__(scheduler, start_tokens)
        self.packing = packing
        self.slots = Slots(scheduler.session.max_batch_size, largest_handoff(packing))
        self.transfers = transfers(self.slots.arena)
        self.moved_bytes, self.moved, self.refused = 0, 0, 0

    async def take_slot(self) -> int:
        """Wait for a free slot and return its index; Busy if none becomes free within SLOT_SECONDS."""
        end = time.monotonic() + SLOT_SECONDS
        while (slot := self.slots.take()) is None:
            if time.monotonic() > end:
                raise Busy("busy: no memory for a handoff is free")
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        return slot

    @override
    def figures(self) -> dict[str, Any]:
        return {
            **super().figures(),
            "handoff_slots_free": self.slots.free,
            "handoff_slots_held": self.slots.held,
            "handoffs": self.moved,
            "handoff_bytes": self.moved_bytes,
            "handoffs_refused": self.refused,
            "handoffs_expired": self.slots.expired,
        }


class Prefill(HandingOver):
    """Reads prompts, and offers their contexts to decode workers."""

    _unheard = False
    """True if NIXL's latest report of finished reads failed; consecutive failures are logged once."""

    @override
    async def watch(self) -> None:
        """Free the slots that were read, or were not read in time, until cancelled."""
        while True:
            self.slots.release(self._finished())
            await asyncio.sleep(LOOK_AGAIN_SECONDS if self.slots.held else IDLE_SECONDS)

    def _finished(self) -> list[str]:
        """Return the tags of the slots that were read; none if NIXL fails, and slots are then freed as they expire."""
        try:
            found = self.transfers.finished()
        except Exception:  # NIXL's own, of readers that have died
            if not self._unheard:
                log.exception("NIXL does not say what was read")
            self._unheard = True
            return []
        self._unheard = False
        return found

    @property
    @override
    def is_quiescent(self) -> bool:
        """True if no request runs, and every handoff has been read or has expired."""
        return super().is_quiescent and self.slots.all_free

    @override
    async def answer(self, asked: Mapping[str, Any], identity: str) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk, which offers the prompt's context."""
        # The decode worker applies the rules of the answer; the one token drawn here is thrown away.
        request = replace(
            request_of(asked, self.limits, self.start_tokens), max_new_tokens=1, min_tokens=0, logprobs=None,
            stop_strings=(), keep_context=True,
        )  # fmt: skip
        ticket = self.submit(request, identity)
        try:
            output = await ticket.answer()
        finally:
            self.forget(identity)
        assert ticket.context is not None, "it was asked for"
        offer = await self._offer(ticket.context, None if output.kv_proof is None else output.kv_proof.of_prompt)
        self.moved, self.moved_bytes = self.moved + 1, self.moved_bytes + offer.handoff.nbytes
        # Dynamo takes the offer from the first chunk, and would end the answer for any other reason than `length`.
        yield {
            "token_ids": [output.token_ids[0]],
            "index": 0,
            "finish_reason": "length",
            "disaggregated_params": {OFFER: offer.model_dump(exclude_none=True)},
        }

    async def _offer(self, context: Context, record: PromptRecord | None) -> Offer:
        """Write a context into a slot, hold it for its reader, and return the offer for the reader.

        `record` is the prompt's record for a proof, if the request asks for one.
        """
        slot = await self.take_slot()
        writing = asyncio.ensure_future(
            asyncio.to_thread(write_handoff, context, self.packing, self.slots.bytes_of(slot))
        )
        try:
            handoff = await asyncio.shield(writing)
        except BaseException:  # the request may be cancelled while the thread still writes into the slot
            writing.add_done_callback(lambda _: self.slots.give_back(slot))
            raise
        tag, address = uuid.uuid4().hex, self.slots.address(slot)
        self.slots.hold(slot, tag)
        kv_proof = None if record is None else prompt_document_of(record)
        return Offer(
            version=1, handoff=handoff, tag=tag, address=address, agent=self.transfers.agent, kv_proof=kv_proof
        )


class Decode(HandingOver):
    """Answers prompts that a prefill worker has read."""

    def __init__(
        self, scheduler: Scheduler, start_tokens: Sequence[int], packing: RowPacking, transfers: MakeTransfers
    ) -> None:
        super().__init__(scheduler, start_tokens, packing, transfers)
        self._used: deque[str] = deque(maxlen=REMEMBERED)

    @override
    async def answer(self, asked: Mapping[str, Any], identity: str) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of an answer that starts from the context of the request's offer.

        Raises HandoffRefused if the request has no valid offer or one that was used before, and if the context does not
        come in time or does not match the offer.
        """
        prompt = prompt_of(asked, self.start_tokens)
        request = request_of(asked, self.limits, self.start_tokens)
        try:
            offer = offer_of(asked)
            check_handoff(offer.handoff, self.packing, prompt)
            record = _record_of(offer) if request.kv_proof is not None else None
            if offer.tag in self._used:
                raise HandoffRefused("the handoff was used before")
            self._used.append(offer.tag)
            context = await self._fetch(offer)
        except HandoffRefused:
            self.refused += 1
            raise
        self.moved, self.moved_bytes = self.moved + 1, self.moved_bytes + offer.handoff.nbytes
        request = replace(
            request, prompt_token_ids=(), context=context, context_token_ids=prompt, kv_proof_prompt=record
        )
        async with aclosing(self.follow(request, identity)) as events:
            async for event in events:
                output = event.output
                if output is not None:  # report the prompt as if this process had read it
                    moved = offer.handoff.nbytes
                    output = replace(output, prompt_token_ids=tuple(prompt), reused_tokens=0, moved_bytes=moved)
                yield chunk_of(replace(event, output=output), for_gateway=is_ours(asked))

    async def _fetch(self, offer: Offer) -> Context:
        """Return the context of an offer; HandoffRefused if it does not come in time, or does not match the offer.

        The slot is freed once nothing is written there any more, however long NIXL needs for that.
        """
        slot = await self.take_slot()
        fetching = asyncio.ensure_future(self._fetch_into(offer, self.slots.bytes_of(slot)))
        fetching.add_done_callback(lambda done: self._fetched(slot, done))
        await asyncio.wait({fetching}, timeout=GIVE_UP_SECONDS)
        if not fetching.done():
            raise HandoffRefused(f"the handoff was not read within {GIVE_UP_SECONDS:.0f} seconds")
        return fetching.result()

    async def _fetch_into(self, offer: Offer, into: Bytes) -> Context:
        await self.transfers.fetch(offer, into)
        return await asyncio.to_thread(read_handoff, offer.handoff, self.packing, into)

    def _fetched(self, slot: int, done: asyncio.Future[Context]) -> None:
        self.slots.give_back(slot)
        if not done.cancelled():
            done.exception()  # the request may be gone: without this, asyncio logs an error that nobody fetched


def _record_of(offer: Offer) -> PromptRecord:
    """Return the prompt's record in an offer, for a proof; HandoffRefused if it is missing or invalid."""
    if offer.kv_proof is None:
        raise HandoffRefused("the handoff does not say what was kept, and a proof is asked for")
    try:
        return prompt_record_of(offer.kv_proof, "the handoff")
    except InputError as error:
        raise HandoffRefused(error.message) from None


def offer_of(asked: Mapping[str, Any]) -> Offer:
    """Return the offer in a request; HandoffRefused if it is missing or invalid."""
    found: Any = asked
    for name in ("prefill_result", "disaggregated_params", OFFER):
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None:
        raise HandoffRefused("no handoff came with the request, and a decode worker reads no prompts")
    try:
        return validated(Offer, found, "the handoff")
    except InputError as error:
        raise HandoffRefused(error.message) from None
