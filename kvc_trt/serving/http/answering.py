"""Chats and completions: from the body of a request to its response, or to the events of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.serving.errors import ServingError, logged, serving_error
from kvc_trt.serving.http.models import Models
from kvc_trt.serving.protocol.body import json_object
from kvc_trt.serving.protocol.choices import Choice, Part
from kvc_trt.serving.protocol.documents import Documents
from kvc_trt.serving.protocol.errors import ApiError, api_error
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.model import ServedModel
from kvc_trt.serving.protocol.prompts import read_prompts
from kvc_trt.serving.protocol.request import ApiRequest, parse

_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_LAST_EVENT = b"data: [DONE]\n\n"


class Asked:
    """A request that an engine has taken: its choices, each with the ticket of its answer."""

    def __init__(self, request: ApiRequest, model: ServedModel) -> None:
        self.request, self.model = request, model
        self.choices: list[Choice] = []
        self._tickets: list[Ticket] = []

    @classmethod
    def of(cls, content: bytes, endpoint: Endpoint, models: Models) -> Asked:
        """Read a body and submit what it asks for: all of its answers, or none.

        Raises ApiError and ServingError. It may take seconds, so no asyncio loop should wait for it.
        """
        request = parse(json_object(content), endpoint)
        model, engine = models.find(request.model)
        asked = cls(request, model)
        try:
            for place, prompt in enumerate(read_prompts(request, model)):
                for index in range(request.n):
                    answer = request.of_answer(prompt.token_ids, index, prompt.grammar)
                    asked._tickets.append(engine.take(answer))
                    reader = model.tool_format.reader(request.tools, prompt.rendered, request.rules.grammar)
                    found = len(asked.choices)
                    asked.choices.append(
                        Choice(endpoint, found, answer, model, prompt=place, opening=prompt.text, reader=reader)
                    )
        except BaseException:
            asked.cancel()
            raise
        return asked

    def cancel(self) -> None:
        """End the answers that are not over."""
        for ticket in self._tickets:
            ticket.cancel()

    async def parts(self) -> AsyncGenerator[list[Part], None]:
        """Yield what comes of any of the answers, until all are over; ServingError where one of them fails."""
        found: asyncio.Queue[list[Part] | Exception | None] = asyncio.Queue()

        async def follow(choice: Choice, ticket: Ticket) -> None:
            try:
                async for event in ticket:
                    found.put_nowait(choice.push(event))
                found.put_nowait(None)
            except Exception as error:
                found.put_nowait(error)

        tasks = [asyncio.create_task(follow(*one)) for one in zip(self.choices, self._tickets, strict=True)]
        try:
            running = len(tasks)
            while running:
                parts = await found.get()
                if isinstance(parts, Exception):
                    raise serving_error(parts) from parts
                if parts is None:
                    running -= 1
                elif parts:
                    yield parts
        finally:
            self.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def answer(request: web.Request, endpoint: Endpoint, models: Models) -> web.StreamResponse:
    """Answer a chat or a completion. A client that leaves ends its answers."""
    asked = await _taken(await request.read(), endpoint, models)
    try:
        documents = Documents(endpoint, asked.model)
        if asked.request.stream:
            return await _stream(request, asked, documents)
        async for _ in asked.parts():
            pass
        return web.json_response(documents.response(asked.choices))
    finally:
        asked.cancel()


async def _taken(content: bytes, endpoint: Endpoint, models: Models) -> Asked:
    """Take a request beside the loop; one whose client leaves meanwhile is cancelled once it is taken."""
    taking = asyncio.get_running_loop().run_in_executor(None, Asked.of, content, endpoint, models)
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        taking.add_done_callback(_given_up)
        raise


def _given_up(taking: asyncio.Future[Asked]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().cancel()


async def _stream(request: web.Request, asked: Asked, documents: Documents) -> web.StreamResponse:
    """Send the answers as they come. What fails after the first byte is the stream's last event."""
    with_usage = asked.request.include_usage
    response = web.StreamResponse(headers=_EVENTS)
    await response.prepare(request)
    try:
        for choice in asked.choices:
            for part in choice.begin():
                await response.write(_event(documents.chunk([part], with_usage=with_usage)))
        async with aclosing(asked.parts()) as found:
            async for parts in found:
                await response.write(b"".join(_event(documents.chunk([one], with_usage=with_usage)) for one in parts))
        last = _event(documents.usage_chunk(asked.choices)) if with_usage else b""
        await response.write(last + _LAST_EVENT)
    except ServingError as error:
        await response.write(_event(api_error(error).document))
    except ConnectionError:  # the client has left
        return response
    except Exception as error:
        await response.write(_event(ApiError(500, logged(error)).document))
    await response.write_eof()
    return response


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
