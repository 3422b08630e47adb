"""An engine behind Dynamo's frontend, whole: it reads the prompts of its requests and answers them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from kvc_trt.runtime import Event, Request, Scheduler, Ticket
from kvc_trt.serving.dynamo.chunks import Chunk, chunk_of
from kvc_trt.serving.dynamo.requests import request_of
from kvc_trt.serving.dynamo.wire import is_ours


class Answering:
    """Answers messages of Dynamo's frontend with one scheduler. Used from one asyncio loop."""

    def __init__(self, scheduler: Scheduler, start_tokens: Sequence[int] = ()) -> None:
        self.scheduler = scheduler
        self.limits = scheduler.session.executor.limits
        self.start_tokens = tuple(start_tokens)
        """See `model_directory.start_tokens`."""
        self._tickets: dict[str, Ticket] = {}

    def answer(self, asked: Mapping[str, Any], identity: str) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of an answer, as `answer_whole`; a role of its own answers its part."""
        return self.answer_whole(asked, identity)

    async def answer_whole(self, asked: Mapping[str, Any], identity: str) -> AsyncGenerator[Chunk, None]:
        """Read a prompt and yield the chunks of its answer.

        Closing the generator ends the request, and so does `cancel`.
        Raises InputError for what cannot be answered, Busy for a full queue, Cancelled, and what the engine raises.
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
        """Submit a request under its identity, by which it can be cancelled until it is forgotten."""
        ticket = self._tickets[identity] = self.scheduler.submit(request)
        return ticket

    def forget(self, identity: str) -> None:
        """End a request, if it has not ended, and let its identity go."""
        self._tickets.pop(identity).cancel()

    def cancel(self, identity: str) -> None:
        """End a request; nothing happens if there is none of that identity."""
        ticket = self._tickets.get(identity)
        if ticket is not None:
            ticket.cancel()

    def figures(self) -> dict[str, Any]:
        """Return what is counted, as plain values."""
        return self.scheduler.metrics()

    async def watch(self) -> None:
        """Do what has to be done beside the answers, until it is cancelled."""

    @property
    def is_quiescent(self) -> bool:
        """True if no reader needs this worker's memory any more."""
        return not self._tickets

    def close(self) -> None:
        """Answer what has been taken, and end; blocks until then."""
        self.scheduler.close(drain=True)
