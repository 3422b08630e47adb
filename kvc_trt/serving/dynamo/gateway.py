"""The gateway for clients: it checks the API key, which Dynamo's frontend cannot, and passes requests on to it.

It also mends what Dynamo 1.6.1 does to a request that is refused. The frontend drops some fields without a word, and
writes a worker's refusal into a stream of status 200; here each is an error of status 4xx with its reason, in the form
of OpenAI's API.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

from kvc_trt.errors import InputError
from kvc_trt.serving.dynamo.bodies import checked_body, error_of_answer, error_of_status, error_of_stream
from kvc_trt.serving.exposition import merged

LARGEST_BODY = 64 << 20
HEALTH_SECONDS = 30.0
_ASKED = ("/v1/chat/completions", "/v1/completions")
_SHOWN = ("/v1/models", "/v1/models/{name}", "/live")
_REFUSED = {
    404: "there is nothing at this path",
    405: "this path takes requests of another method",
    413: f"the body has more than {LARGEST_BODY >> 20} MiB",
}
_PASSED_ON = ("Content-Type", "Accept", "x-request-id")


class Gateway:
    """Passes requests on to a frontend at `upstream`, an URL without a path.

    Each of `models`, and of those that the frontend knows, must answer for the server to be healthy. `status` returns
    the URLs of the workers' own status, whose figures are shown beside the frontend's.
    """

    def __init__(
        self,
        upstream: str,
        api_key: str | None = None,
        *,
        models: Sequence[str] = (),
        status: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._upstream, self._api_key = upstream, api_key
        self._models, self._status = tuple(models), status
        self._session: ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begin to listen, and return the port; OSError where it is taken."""
        application = web.Application(client_max_size=LARGEST_BODY, middlewares=[_in_our_form])
        for path in _ASKED:
            application.router.add_post(path, self._ask)
        for path in _SHOWN:
            application.router.add_get(path, self._show)
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        # As many connections as clients: how many requests wait is for the workers to say, who refuse the others.
        self._session = ClientSession(
            timeout=ClientTimeout(total=None, sock_connect=10), connector=TCPConnector(limit=0)
        )
        # A client that leaves ends its handler, which closes the connection to the frontend, which ends the request.
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        listening: int = self._runner.addresses[0][1]
        return listening

    async def refuse_newcomers(self) -> None:
        """Take no more connections; answers that have begun go on."""
        if self._runner is not None:
            for site in tuple(self._runner.sites):
                await site.stop()

    async def close(self) -> None:
        """End whatever is left."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def answers(self, model: str) -> bool:
        """Return whether a model answers a request of one token."""
        body = {"model": model, "prompt": [0], "max_tokens": 1, "ignore_eos": True}
        try:
            async with self._client.post(
                f"{self._upstream}/v1/completions", json=body, timeout=ClientTimeout(total=HEALTH_SECONDS)
            ) as answer:
                return answer.status == 200 and bool((await answer.json()).get("choices"))
        except (ClientError, asyncio.TimeoutError, ValueError):
            return False

    async def models(self) -> list[str]:
        """Return the names of the models that the frontend knows, whether they answer or not."""
        try:
            async with self._client.get(f"{self._upstream}/v1/models") as answer:
                return [model["id"] for model in (await answer.json())["data"]]
        except (ClientError, asyncio.TimeoutError, ValueError, KeyError):
            return []

    @property
    def _client(self) -> ClientSession:
        assert self._session is not None, "it listens"
        return self._session

    def _refused(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request without the key; None for one that may pass."""
        if self._api_key is None or request.path == "/live":
            return None
        given = request.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {self._api_key}".encode()):
            return None
        return _error(401, "this server wants its API key: Authorization: Bearer KEY")

    async def _show(self, request: web.Request) -> web.StreamResponse:
        refused = self._refused(request)
        if refused is not None:
            return refused
        try:
            async with self._client.get(f"{self._upstream}{request.rel_url.raw_path}") as answer:
                return await _whole(answer)
        except (ClientError, asyncio.TimeoutError):
            return _error(503, "the frontend does not answer")

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """Show the figures of the frontend and of every worker here; a worker that is down has none."""
        refused = self._refused(request)
        if refused is not None:
            return refused
        texts = await asyncio.gather(*(self._figures(url) for url in (self._upstream, *self._status())))
        return web.Response(text=merged(texts), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _figures(self, url: str) -> str:
        try:
            async with self._client.get(f"{url}/metrics", timeout=ClientTimeout(total=5)) as answer:
                return await answer.text() if answer.status == 200 else ""
        except (ClientError, asyncio.TimeoutError):
            return ""

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """Say that every model answers, by a request to each of them."""
        refused = self._refused(request)
        if refused is not None:
            return refused
        names = sorted({*self._models, *await self.models()})
        answers = dict(zip(names, await asyncio.gather(*map(self.answers, names)), strict=True))
        healthy = bool(answers) and all(answers.values())
        status = {name: "answers" if answered else "does not answer" for name, answered in answers.items()}
        body = {"status": "healthy" if healthy else "unhealthy", "models": status}
        return web.json_response(body, status=200 if healthy else 503)

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        refused = self._refused(request)
        if refused is not None:
            return refused
        try:
            body = checked_body(await request.read())
            content = json.dumps(body).encode()
        except InputError as error:
            return _error(400, error.message)
        except RecursionError:
            return _error(400, "the body is nested too deeply")
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        headers["Content-Type"] = "application/json"
        try:
            async with self._client.post(f"{self._upstream}{request.path}", data=content, headers=headers) as answer:
                if body.get("stream") is True and answer.status == 200:
                    return await _stream(request, answer)
                return await _whole(answer)
        except (ClientError, asyncio.TimeoutError):
            return _error(503, "the frontend does not answer")


@web.middleware  # type: ignore[untyped-decorator]
async def _in_our_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give the refusals of the library, such as of a body that is too large, the form of ours."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error(error.status, _REFUSED.get(error.status, error.reason))


async def _whole(answer: ClientResponse) -> web.Response:
    """Pass on an answer that is one document, or the error that it is or holds."""
    content = await answer.read()
    found = error_of_answer(content) if answer.status < 400 else error_of_status(answer.status, content)
    if found is not None:
        return _error(*found)
    return web.Response(body=content, status=answer.status, headers={"Content-Type": answer.content_type})


async def _stream(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    """Pass on an answer piece by piece; one that begins with an error is that error."""
    begun, found = b"", None
    pieces = answer.content.iter_any()
    async for piece in pieces:
        begun += piece
        found = error_of_stream(begun)
        if found is not None:
            break
    if found is None:
        found = error_of_stream(begun, ended=True)
    if found:
        return _error(*found)
    passed = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await passed.prepare(request)
    await passed.write(begun)
    try:
        async for piece in pieces:
            await passed.write(piece)
    except (ClientError, asyncio.TimeoutError):  # the frontend died: an end without a word would read as the answer's
        await passed.write(b"data: " + json.dumps(_body(503, "the frontend does not answer")).encode() + b"\n\n")
    await passed.write_eof()
    return passed


def _error(status: int, message: str) -> web.Response:
    return web.json_response(_body(status, message), status=status)


def _body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
