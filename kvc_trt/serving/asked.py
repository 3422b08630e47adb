"""Turn the body of a request to OpenAI's API into the documents of its answers, independent of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvc_trt.serving.errors import serving_error
from kvc_trt.serving.models import Models, PendingAnswer, Served
from kvc_trt.serving.protocol.body import json_object
from kvc_trt.serving.protocol.choices import Choice, Part
from kvc_trt.serving.protocol.documents import Documents
from kvc_trt.serving.protocol.errors import refused
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.model import ServedModel
from kvc_trt.serving.protocol.prompts import read_prompts
from kvc_trt.serving.protocol.request import ApiRequest, parse


class Asked:
    """A request that an engine has accepted: its choices, each with its answer."""

    def __init__(self, request: ApiRequest, model: ServedModel, engine: Served) -> None:
        self.request, self._engine = request, engine
        self._documents = Documents(request.endpoint, model)
        self._choices: list[Choice] = []
        self._answers: list[PendingAnswer] = []

    @classmethod
    def of(cls, content: bytes, endpoint: Endpoint, models: Models) -> Asked:
        """Read a body and submit its request: either all of its answers are accepted, or none.

        Raises ApiError for an invalid request and ServingError for a refused one. It may take seconds: do not call it
        on an asyncio loop.
        """
        request = parse(json_object(content), endpoint)
        model, engine = models.find(request.model)
        asked = cls(request, model, engine)
        try:
            prompts = read_prompts(request, model)
            _check_possible(request, len(prompts), engine)
            for place, prompt in enumerate(prompts):
                for index in range(request.n):
                    answer = request.of_answer(prompt.token_ids, index, prompt.grammar)
                    asked._answers.append(engine.take(answer, priority=-request.priority))
                    reader = model.tool_format.reader(request.tools, prompt.rendered, request.rules.grammar)
                    found = len(asked._choices)
                    asked._choices.append(
                        Choice(endpoint, found, answer, model, prompt=place, opening=prompt.text, reader=reader)
                    )
        except BaseException:
            asked.cancel()
            raise
        return asked

    def cancel(self) -> None:
        """Cancel the answers that are not over."""
        for answer in self._answers:
            answer.cancel()

    async def begin(self) -> None:
        """Wait until the engine has accepted every answer for good; ServingError if it refuses one."""
        await self._engine.begin(self._answers)

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers and return the response; ServingError if one of them fails."""
        async for _ in self._parts():
            pass
        return self._documents.response(self._choices)

    async def chunks(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield the chunks of a stream as they come, one or more at a time; ServingError if an answer fails."""
        with_usage = self.request.include_usage
        yield [self._chunk(part, with_usage) for choice in self._choices for part in choice.begin()]
        async with aclosing(self._parts()) as found:
            async for parts in found:
                yield [self._chunk(part, with_usage) for part in parts]
        if with_usage:
            yield [self._documents.usage_chunk(self._choices)]

    def _chunk(self, part: Part, with_usage: bool) -> dict[str, Any]:
        return self._documents.chunk([part], with_usage=with_usage)

    async def _parts(self) -> AsyncGenerator[list[Part], None]:
        """Yield the parts of all answers as they come, until all are over; ServingError if one of them fails."""
        found: asyncio.Queue[list[Part] | Exception | None] = asyncio.Queue()

        async def follow(choice: Choice, answer: PendingAnswer) -> None:
            try:
                async for event in answer:
                    found.put_nowait(choice.push(event))
                    if choice.wants_no_more:
                        answer.finish()
                found.put_nowait(None)
            except Exception as error:
                found.put_nowait(error)

        tasks = [asyncio.create_task(follow(*one)) for one in zip(self._choices, self._answers, strict=True)]
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


def _check_possible(request: ApiRequest, prompts: int, engine: Served) -> None:
    """Raise ApiError for more answers than rows and queue can ever hold, and for a salt that would be ignored."""
    if request.is_salted and engine.shares_prompts:
        raise refused("cache_salt: this server shares prompt prefixes among all clients", "cache_salt")
    count, most = request.n * prompts, engine.most_answers
    if most is not None and count > most:
        found = f"{count} answers ({request.n} to each of {prompts} prompts)" if prompts > 1 else f"{count} answers"
        raise refused(
            f"n: {found} exceed this server's capacity of {most}, its queue included: ask for fewer, or in several "
            "requests",
            "n",
        )
