"""The gateway's own work, before a frontend that this test makes."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from benchmarks.soak.gateway import MODEL, write_model
from kvc_trt.runtime import Event, Output, Request
from kvc_trt.serving.dynamo.gateway import Gateway
from kvc_trt.serving.dynamo.remote import RemoteAnswer
from kvc_trt.serving.dynamo.remote_models import RemoteModels
from kvc_trt.serving.dynamo.wire import OUR_DATA, OURS, document_of_event, document_of_refusal
from kvc_trt.serving.errors import ServingError

MANY = 130
"""More than a session of aiohttp connects by default."""
ENDLESS, CUT, REFUSED, LOST, NOBODY, BROKEN, STRANGE = range(100, 107)
"""Prompts, of one token, to which the frontend has an answer of its own."""


def chunk(said: object) -> bytes:
    return b"data: " + json.dumps({"choices": [], "nvext": {OUR_DATA: {OURS: said}}}).encode() + b"\n\n"


class Frontend:
    """Answers as Dynamo's frontend would for its workers."""

    def __init__(self) -> None:
        self.asked = 0

    async def listen(self) -> str:
        application = web.Application()
        application.router.add_post("/v1/completions", self.complete)
        application.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        (token, *_) = (await request.json())["prompt"]
        if token == LOST:
            return web.json_response({"message": "of /a/path", "type": "Internal", "code": 500}, status=500)
        if token == NOBODY:
            return web.Response(status=404)
        begun = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await begun.prepare(request)
        await begun.write(b": a comment\n\n")
        if token == REFUSED:
            await begun.write(chunk(document_of_refusal(ServingError("busy", "busy: come again"))))
        elif token == BROKEN:
            await begun.write(b'data: {"error": {"message": "no cache", "type": "x", "code": 503}}\n\ndata: [DONE]\n\n')
        elif token == STRANGE:
            await begun.write(b'data: {"choices": []}\n\n')
        else:
            first = chunk(document_of_event(Event(0, 5, "w\u00e9ll", None)))
            for place in range(len(first)):  # a character, and a document, in many pieces
                await begun.write(first[place : place + 1])
        if token == ENDLESS:
            await asyncio.sleep(60)
        elif token not in (CUT, REFUSED, BROKEN, STRANGE):
            output = Output((token,), (5, 6), "well done", "stop", 2, (2,))
            await begun.write(chunk(document_of_event(Event(0, 6, " done", output))))
            await begun.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        return begun

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}, {"id": "of somebody else"}]})


async def asked(url: str, session: ClientSession, token: int, **more: object) -> tuple[int, str]:
    body = {"model": MODEL, "prompt": [token], **more}
    async with session.post(f"{url}/v1/completions", json=body, timeout=ClientTimeout(5)) as answer:
        return answer.status, await answer.text()


async def many_wait(url: str, session: ClientSession, frontend: Frontend) -> None:
    """However many answers are under way, the next request reaches the frontend, and so does the look at its health."""
    before = frontend.asked
    body = {"model": MODEL, "prompt": [ENDLESS], "stream": True}
    streams = await asyncio.gather(*(session.post(f"{url}/v1/completions", json=body) for _ in range(MANY)))
    assert frontend.asked == before + MANY, frontend.asked
    async with session.get(f"{url}/health", timeout=ClientTimeout(5)) as answer:
        assert answer.status == 200, await answer.text()
    async with session.get(f"{url}/v1/models") as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == [MODEL]
    status, text = await asked(url, session, 5)
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "w\u00e9ll done"), text
    assert json.loads(text)["usage"]["completion_tokens"] == 2
    for stream in streams:
        stream.close()


async def every_failure_has_its_status(url: str, session: ClientSession) -> None:
    """Check that a failure before the first token has a status, in a stream too, and a later one is the last event."""
    wanted = [
        (REFUSED, 503, "busy: come again"),
        (BROKEN, 503, "no cache"),
        (LOST, 500, "the server failed at this request"),
        (NOBODY, 503, "no worker of this model is there now"),
        (STRANGE, 500, "its log says why"),
    ]
    for token, status, message in wanted:
        for stream in (False, True):
            found, text = await asked(url, session, token, stream=stream)
            assert (found, message in text) == (status, True), (token, found, text)
    status, text = await asked(url, session, CUT)
    assert (status, "the worker ended before its answer did" in text) == (503, True), text
    status, text = await asked(url, session, CUT, stream=True)
    assert (status, "the worker ended before its answer did" in text) == (200, True), text
    assert "[DONE]" not in text


class Late:
    """A frontend that begins to answer after the request was cancelled."""

    status, closed = 200, False

    async def post(self, *_: object, **more: object) -> Late:
        self.answer.cancel()
        return self

    def close(self) -> None:
        self.closed = True


def test_an_answer_that_comes_too_late_is_closed():
    late = Late()
    late.answer = RemoteAnswer(late, "http://nobody", MODEL, Request((5,)))
    with pytest.raises(ServingError, match="cancelled"):
        asyncio.run(late.answer.begin())
    assert late.closed


async def story() -> None:
    frontend = Frontend()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / MODEL)
        gateway = Gateway(RemoteModels(await frontend.listen(), Path(folder), [MODEL]))
        url = f"http://127.0.0.1:{await gateway.listen('127.0.0.1', 0)}"
        async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(30)) as session:
            await many_wait(url, session, frontend)
            await every_failure_has_its_status(url, session)
            await gateway.refuse_newcomers()
            await gateway.close()


def test_many_clients_and_every_failure_of_the_frontend():
    asyncio.run(asyncio.wait_for(story(), 90))
