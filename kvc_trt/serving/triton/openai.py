"""OpenAI's API through tensors: `openai_request` holds the body of a request, `openai_response` that of a response.

A request with `messages` is a chat, any other a completion. An answer is one response with a JSON document, or in a
stream one response for each chunk; `openai_status` is the status that an HTTP server would send.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from typing_extensions import override

from kvc_trt.errors import InputError
from kvc_trt.runtime.request import Request
from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.serving.asked import Asked
from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.errors import ServingError, logged
from kvc_trt.serving.models import OneModel
from kvc_trt.serving.protocol.body import json_object
from kvc_trt.serving.protocol.errors import ApiError, api_error, refused
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.model import ServedModel as ApiModel
from kvc_trt.serving.triton.model import TritonEngine, cancel_when_gone
from kvc_trt.serving.triton.tensors import (
    OPENAI_OUTPUTS,
    OPENAI_REQUEST,
    array_of,
    parameters_of,
    read_request,
    response,
    tensors_of,
)


class OpenAiModel(TritonEngine):
    """One engine that answers requests with text, with token ids, or with a body of OpenAI's API."""

    def __init__(self, pb_utils: Any, args: Mapping[str, str], engine: ServedEngine) -> None:
        super().__init__(pb_utils, args, engine, read_request)
        self._api: ApiModel | None = None
        if engine.engine.directory.tokenizer is not None:
            self._api = ApiModel.of(args["model_name"], engine.engine.directory, engine.limits, int(time.time()))

    @override
    def execute(self, requests: Iterable[Any]) -> None:
        for request in requests:
            if all(tensor.name() != OPENAI_REQUEST for tensor in request.inputs()):
                super().execute([request])
                continue
            given: dict[str, object] | InputError
            try:
                given = {**parameters_of(request), **tensors_of(request, {})}
            except InputError as error:
                given = error
            answering = self._answer(given, request.timeout(), request.get_response_sender())
            asyncio.run_coroutine_threadsafe(answering, self._loop)

    async def _answer(self, given: dict[str, object] | InputError, microseconds: int, sender: Any) -> None:
        """Send the documents of an answer, the last one with the flag that ends Triton's request."""
        self._unanswered += 1
        status, waiting = 200, None
        try:
            async for document in self._documents(given, microseconds, sender):
                if waiting is not None:
                    sender.send(self._response(status, waiting))
                waiting = document
        except Exception as error:  # an error must not reach other requests
            if waiting is not None:
                sender.send(self._response(status, waiting))
            failed = _failure(error)
            status, waiting = failed.status, failed.document
        if self._unanswered == 1:
            self._show()
        self._unanswered -= 1
        sender.send(self._response(status, waiting), flags=self._final)

    async def _documents(
        self, given: dict[str, object] | InputError, microseconds: int, sender: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        asked = await asyncio.to_thread(self._asked, given, microseconds)
        watching = asyncio.create_task(cancel_when_gone(sender, asked))
        try:
            if not asked.request.stream:
                yield await asked.whole()
                return
            async for chunks in asked.chunks():
                for chunk in chunks:
                    yield chunk
        finally:
            watching.cancel()
            asked.cancel()

    def _asked(self, given: dict[str, object] | InputError, microseconds: int) -> Asked:
        """Read a body and submit it; ApiError or InputError if it is invalid, ServingError if the engine refuses it."""
        if isinstance(given, InputError):
            raise given
        body = given.pop(OPENAI_REQUEST)
        if given:
            raise refused(f"{OPENAI_REQUEST} goes alone, found {', '.join(sorted(given))} beside it")
        if self._api is None:
            raise refused("this model has no tokenizer, and OpenAI's API is made of text; give input_ids")
        content = body if isinstance(body, bytes) else str(body).encode()
        endpoint = Endpoint.CHAT if "messages" in json_object(content) else Endpoint.COMPLETIONS
        served = _Within(self._served, microseconds / 1e6 if microseconds else None)
        return Asked.of(content, endpoint, OneModel(self._api, served))

    def _response(self, status: int, document: dict[str, Any] | None) -> Any:
        values = (json.dumps(document).encode(), status)
        named = zip(OPENAI_OUTPUTS.items(), values, strict=True)
        return response(self._pb_utils, [(name, array_of([[value]], of_type)) for (name, of_type), value in named])


class _Within:
    """An engine whose answers must be complete within `seconds` seconds; None sets no limit."""

    def __init__(self, engine: ServedEngine, seconds: float | None) -> None:
        self._engine, self._seconds = engine, seconds

    @property
    def most_answers(self) -> int:
        """The largest number of answers that may run and wait at once."""
        return self._engine.most_answers

    @property
    def shares_prompts(self) -> bool:
        """True if a prompt may reuse the cached prefix of another request's prompt."""
        return self._engine.shares_prompts

    def take(self, request: Request, *, priority: int = 0) -> Ticket:
        """Take a request as `ServedEngine.take` does, with this object's time limit."""
        return self._engine.take(request, priority=priority, seconds=self._seconds)

    async def begin(self, answers: Any) -> None:
        """Return at once, as `ServedEngine.begin`."""

    async def answers(self) -> bool:
        """Return whether a one-token request succeeds or the engine is busy, as `ServedEngine.answers`."""
        return await self._engine.answers()


def _failure(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return refused(error.message)
    return api_error(error) if isinstance(error, ServingError) else ApiError(500, logged(error))
