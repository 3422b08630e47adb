"""Chats and completions: from the body of a request to its response, or to the events of a stream."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

from aiohttp import web

from kvc_trt.serving.asked import Asked
from kvc_trt.serving.errors import ServingError, logged
from kvc_trt.serving.models import Models
from kvc_trt.serving.protocol.errors import ApiError, api_error
from kvc_trt.serving.protocol.fields import Endpoint

_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_LAST_EVENT = b"data: [DONE]\n\n"


async def answer(request: web.Request, endpoint: Endpoint, models: Models) -> web.StreamResponse:
    """Answer a chat or a completion. A client that leaves ends its answers."""
    asked = await _taken(await request.read(), endpoint, models)
    try:
        await asked.begin()
        if asked.request.stream:
            return await _stream(request, asked)
        return web.json_response(await asked.whole())
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


async def _stream(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Send the answers as they come. What fails after the first byte is the stream's last event."""
    response = web.StreamResponse(headers=_EVENTS)
    await response.prepare(request)
    try:
        async with aclosing(asked.chunks()) as found:
            async for chunks in found:
                await response.write(b"".join(map(_event, chunks)))
        await response.write(_LAST_EVENT)
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
