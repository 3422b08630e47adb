"""Answer chats and completions over HTTP, with a response or the events of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import web

from kvc_trt.serving.asked import Asked
from kvc_trt.serving.errors import ServingError, logged
from kvc_trt.serving.models import Models
from kvc_trt.serving.protocol.errors import ApiError, api_error
from kvc_trt.serving.protocol.fields import Endpoint

_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_LAST_EVENT = b"data: [DONE]\n\n"


async def answer(request: web.Request, content: bytes, endpoint: Endpoint, models: Models) -> web.StreamResponse:
    """Answer a chat or a completion, whose body is `content`. If the client leaves, its answers are cancelled."""
    asked = await _taken(content, endpoint, models)
    try:
        await asked.begin()
        if asked.request.stream:
            return await _stream(request, asked)
        return web.json_response(await asked.whole())
    finally:
        asked.cancel()


async def _taken(content: bytes, endpoint: Endpoint, models: Models) -> Asked:
    """Read and submit a request on another thread; if the client leaves meanwhile, cancel it once it is submitted."""
    taking = asyncio.get_running_loop().run_in_executor(None, Asked.of, content, endpoint, models)
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        taking.add_done_callback(_given_up)
        raise


def _given_up(taking: asyncio.Future[Asked]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().cancel()


async def _stream(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Send the events of the answers as they come, and return the finished response."""
    response = web.StreamResponse(headers=_EVENTS)
    with suppress(ConnectionError):  # the client has left
        await response.prepare(request)
        async with aclosing(_events(asked)) as found:
            async for events in found:
                await response.write(events)
        await response.write_eof()
    return response


async def _events(asked: Asked) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; if an answer fails, the last event is its error."""
    try:
        async with aclosing(asked.chunks()) as found:
            async for chunks in found:
                yield b"".join(map(_event, chunks))
        yield _LAST_EVENT
    except ServingError as error:
        yield _event(api_error(error).document)
    except Exception as error:
        yield _event(ApiError(500, logged(error)).document)


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
