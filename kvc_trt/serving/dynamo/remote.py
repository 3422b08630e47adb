"""Engines in other processes, behind Dynamo's frontend, with the interface that the light server uses for its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession

from kvc_trt.errors import InputError
from kvc_trt.runtime.request import Event, Request
from kvc_trt.serving.dynamo.wire import OUR_DATA, OURS, AnswerReader, message_of
from kvc_trt.serving.errors import Reason, ServingError

HEALTH_SECONDS = 30.0
_SILENT = "the frontend does not answer"
_REASONS: dict[int, Reason] = {400: "invalid", 404: "busy", 429: "busy", 503: "busy", 529: "busy"}


class NotReached(ServingError):
    """A failure outside of workers: the frontend refused the request, or its answer broke off."""


class RemoteAnswer:
    """The answer to one request, which is sent by `begin`."""

    def __init__(self, client: ClientSession, upstream: str, model: str, request: Request) -> None:
        self._client, self._url, self._model, self._request = client, f"{upstream}/v1/completions", model, request
        self._response: ClientResponse | None = None
        self._events: AsyncIterator[Event] | None = None
        self._first: Event | None = None
        self._cancelled = False

    async def begin(self) -> None:
        """Send the request and wait for its first token; ServingError if it is refused."""
        try:
            body = json.dumps(message_of(self._request, self._model), ensure_ascii=False).encode()
            self._response = await self._client.post(self._url, data=body, headers={"Content-Type": "application/json"})
            if self._cancelled:
                self._response.close()
                raise ServingError("cancelled", "the request was cancelled")
            if self._response.status != 200:
                raise _refusal(self._response.status, _json(await self._response.read()))
            self._events = self._read(self._response)
            self._first = await anext(self._events, None)
        except (ClientError, asyncio.TimeoutError):
            raise NotReached("busy", _SILENT) from None

    def finish(self) -> None:
        """Do nothing: no message to a worker ends an answer early and normally, so it runs to its own end."""

    def cancel(self) -> None:
        """Cancel the answer by closing the connection; Dynamo then cancels it at the worker."""
        self._cancelled = True
        if self._response is not None:
            self._response.close()

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        """Yield the events of the answer; ServingError if it cannot be completed."""
        assert self._events is not None, "it has begun"
        event, whole = self._first, False
        try:
            while event is not None:
                whole = event.output is not None
                yield event
                event = await anext(self._events, None)
        except (ClientError, asyncio.TimeoutError):
            if not whole:
                raise NotReached("busy", _SILENT) from None
        if not whole:
            raise NotReached("busy", "the worker ended before its answer did")

    async def _read(self, response: ClientResponse) -> AsyncGenerator[Event, None]:
        reader, whole = AnswerReader(self._request), False
        async for document in _documents(response):
            if whole:  # after the answer, the frontend adds documents of its own
                continue
            try:
                event = reader.read(_said(document))
            except InputError as error:
                raise RuntimeError(f"{error.message}: {document}") from error
            whole = event.output is not None
            yield event


class RemoteEngine:
    """All workers of one model."""

    def __init__(self, client: ClientSession, upstream: str, model: str) -> None:
        self._client, self._upstream, self._model = client, upstream, model

    @property
    def most_answers(self) -> None:
        """None: workers come and go, so the number is not known here."""

    @property
    def shares_prompts(self) -> bool:
        """False: workers share nothing between prompts."""
        return False

    def take(self, request: Request, *, priority: int = 0) -> RemoteAnswer:
        """Return the answer to a request whose prompt is token ids; `RemoteAnswer.begin` sends the request.

        ServingError for a priority, which Dynamo would not pass on to a worker.
        """
        if priority:
            raise ServingError("invalid", "priority works only for an engine in this process, and here workers answer")
        return RemoteAnswer(self._client, self._upstream, self._model, request)

    async def begin(self, answers: Sequence[RemoteAnswer]) -> None:
        """Send the requests, and wait until each has its first token; ServingError if one is refused."""
        await asyncio.gather(*(answer.begin() for answer in answers))

    async def answers(self) -> bool:
        """Return whether a one-token request succeeds or is refused only because a worker is busy.

        A frontend that refuses it, or that no worker stands behind, does not answer, although it calls itself busy."""
        answer = self.take(Request((0,), 1, ignore_eos=True))
        try:
            await asyncio.wait_for(answer.begin(), HEALTH_SECONDS)
        except asyncio.TimeoutError:
            return False
        except ServingError as error:
            of_worker = not isinstance(error, NotReached)
            return of_worker and error.reason == "busy"  # a busy worker is healthy: it answers other requests
        finally:
            answer.cancel()
        return True


async def _documents(response: ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON documents of an event stream, however large each is."""
    waiting = bytearray()
    async for piece in response.content.iter_any():
        before = max(0, len(waiting) - 1)
        waiting += piece
        while (end := waiting.find(b"\n\n", before)) >= 0:
            event, before = bytes(waiting[:end]), 0
            del waiting[: end + 2]
            for document in _of_event(event):
                yield document


def _of_event(event: bytes) -> Iterator[dict[str, Any]]:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    found = _json(b"\n".join(lines))
    if isinstance(found, dict):  # neither a comment nor the end mark
        yield found


def _said(document: dict[str, Any]) -> object:
    """Return a worker's document in a chunk of the frontend; ServingError for an error of the frontend."""
    error = document.get("error")
    if isinstance(error, dict):
        code = error.get("code")
        raise _refusal(code if isinstance(code, int) else 500, error)
    found: Any = document
    for name in ("nvext", OUR_DATA, OURS):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _refusal(status: int, error: object) -> NotReached:
    """Return the error for a status of the frontend; for an internal failure, without its details."""
    message = error.get("message") if isinstance(error, dict) else None
    reason = _REASONS.get(status, "failed")
    if status == 404:
        return NotReached(reason, "no worker of this model is there now")
    if not isinstance(message, str) or reason == "failed":
        return NotReached("failed", "the server failed at this request")
    return NotReached(reason, message)


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
