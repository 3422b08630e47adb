"""An engine behind Dynamo's frontend that both reads prompts and answers them, without handoffs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from kvc_trt.runtime import Event, Request, Scheduler, Ticket
from kvc_trt.serving.dynamo.chunks import Chunk, chunk_of
from kvc_trt.serving.dynamo.requests import request_of
from kvc_trt.serving.dynamo.wire import is_ours


class WholeEngine:
    """Answers messages of Dynamo's frontend with one scheduler. To be used from one asyncio loop."""

    def __init__(self, scheduler: Scheduler, start_tokens: Sequence[int] = ()) -> None:
        self.scheduler = scheduler
        self.limits = scheduler.session.executor.limits
        self.start_tokens = tuple(start_tokens)
        """The tokens to add to prompts that lack them (`model_directory.start_tokens`)."""
        self._tickets: dict[str, Ticket] = {}

    def answer(self, asked: Mapping[str, Any], identity: str) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of an answer, as `answer_whole`; the prefill and decode roles answer their part of it."""
        return self.answer_whole(asked, identity)

    async def answer_whole(self, asked: Mapping[str, Any], identity: str) -> AsyncGenerator[Chunk, None]:
        """Read a prompt and yield the chunks of its answer.

        Closing the generator ends the request, and so does `cancel`. Raises InputError for a request that cannot be
        answered, Busy for a full queue, Cancelled after `cancel`, and the errors of the engine.
        """
        request = request_of(asked, self.limits, self.start_tokens)
        async with aclosing(self.follow(request, identity)) as events:
            async for event in events:
                yield chunk_of(event, for_gateway=is_ours(asked))

    async def follow(self, request: Request, identity: str) -> AsyncGenerator[Event, None]:
        """Submit a request and yield its events."""
        ticket = self.submit(request, identity)
        try:
            async for event in ticket:
                yield event
        finally:
            self.forget(identity)

    def submit(self, request: Request, identity: str) -> Ticket:
        """Submit a request under an identity, by which `cancel` finds it until `forget`."""
        ticket = self._tickets[identity] = self.scheduler.submit(request)
        return ticket

    def forget(self, identity: str) -> None:
        """Cancel a request unless it has ended, and free its identity."""
        self._tickets.pop(identity).cancel()

    def cancel(self, identity: str) -> None:
        """Cancel a request; does nothing if no request has that identity."""
        ticket = self._tickets.get(identity)
        if ticket is not None:
            ticket.cancel()

    def figures(self) -> dict[str, Any]:
        """Return the figures of this worker as plain values (`Scheduler.metrics`)."""
        return self.scheduler.metrics()

    async def watch(self) -> None:
        """Do the role's background work until cancelled; this role has no such work."""

    @property
    def is_quiescent(self) -> bool:
        """True if the worker can end: no request runs, and no other process still reads its memory."""
        return not self._tickets

    def close(self) -> None:
        """Answer all accepted requests, then end; blocks until then."""
        self.scheduler.close(drain=True)
