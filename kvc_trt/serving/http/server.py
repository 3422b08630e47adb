"""The light server: its paths, its start with the engines, and its end after the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.serving.engine import ServedEngine, ServingSettings
from kvc_trt.serving.example import curl
from kvc_trt.serving.http.answering import answer
from kvc_trt.serving.http.door import OPEN, Door
from kvc_trt.serving.models import Models, OwnModels
from kvc_trt.serving.processes import asked_by_signals
from kvc_trt.serving.protocol.body import LARGEST_BODY, json_object
from kvc_trt.serving.protocol.errors import ApiError
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.model import ServedModel
from kvc_trt.serving.protocol.tokenizing import detokenized, tokenized
from kvc_trt.version import __version__

DRAIN_SECONDS = 30.0
"""The longest time that answers may still take after Ctrl-C."""
BODY_SECONDS = 120.0
"""The longest time that the body of a request may take to arrive."""
_ELSEWHERE = {
    "embeddings": "an engine writes text, and makes no embeddings",
    "responses": "ask /v1/chat/completions, with all messages of the conversation",
    "images": "an engine writes text, and makes no images",
    "audio": "an engine reads and writes text alone",
    "moderations": "an engine writes text, and moderates none",
    "rerank": "an engine writes text, and ranks none",
    "score": "an engine writes text, and ranks none",
    "files": "nothing is stored here",
    "batches": "nothing is stored here; send the requests one by one",
    "fine_tuning": "an engine is built from weights that are ready: kvc-trt build",
    "assistants": "nothing is stored here; ask /v1/chat/completions",
    "threads": "nothing is stored here; ask /v1/chat/completions",
}
"""Paths below /v1 that OpenAI's clients may ask for and this server lacks, with the reason of each."""


@dataclass(frozen=True)
class LightDeployment:
    """The engines to serve, with their names in requests, and the address and settings of the server."""

    served: Sequence[tuple[str, Path]]
    """Names of models with the directories of their engines."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    api_key: str | None = None
    origins: Sequence[str] = ()
    """Origins whose pages may send requests from a browser; `*` stands for any."""
    settings: ServingSettings = field(default_factory=ServingSettings)
    tool_parser: str | None = None
    """The name of the form of tool calls, for all models; None takes each model's from its chat template."""


def serve(deployment: LightDeployment, say: Callable[[str], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM. `say` prints a message to the user once all engines answer.

    Raises UnsupportedEnvironment if the address is taken, and the errors of `ServedEngine.open`.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as undo:
        listening = undo.enter_context(_listening(deployment.host, deployment.port))
        settings, parser = deployment.settings, deployment.tool_parser
        models = OwnModels([loaded(name, path, settings, undo, parser) for name, path in deployment.served])
        server = LightServer(models, Door(deployment.api_key, deployment.origins))
        asyncio.run(server.run(listening, lambda: say(_ready(deployment, listening, models, started)), models.close))


class LightServer:
    """An HTTP server for a set of models."""

    def __init__(self, models: Models, door: Door) -> None:
        self._models, self._running = models, 0
        self.ending = False
        """True once new requests are refused."""
        self._all_over = asyncio.Event()
        self.application = web.Application(client_max_size=LARGEST_BODY)
        door.of(self.application)
        routes = self.application.router
        for endpoint in Endpoint:
            routes.add_post(endpoint.value, self._asking(endpoint))
        routes.add_post("/tokenize", self._tokenize)
        routes.add_post("/detokenize", self._detokenize)
        routes.add_get("/v1/models", self._list)
        routes.add_get("/v1/models/{name}", self._show)
        routes.add_get("/health", self._health)
        routes.add_get("/metrics", self._metrics)
        routes.add_get("/version", self._version)
        routes.add_get(OPEN, self._live)
        routes.add_route("*", "/{path:.*}", self._nothing)

    async def run(self, listening: socket.socket, ready: Callable[[], None], end: Callable[[], None]) -> None:
        """Answer until Ctrl-C or SIGTERM; then finish the answers that have begun, for at most DRAIN_SECONDS.

        `ready` is called once the server listens; `end`, on another thread, cancels the answers that are left. A second
        signal cancels them at once.
        """
        asked = asyncio.Event(), asyncio.Event()  # set by the first and the second signal
        runner = web.AppRunner(self.application, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        with asked_by_signals(lambda: asked[asked[0].is_set()].set()):
            site = web.SockSite(runner, listening)
            await site.start()
            ready()
            await asked[0].wait()
            self.ending = True
            await site.stop()
            await _first_of(self._over(), asked[1].wait(), asyncio.sleep(DRAIN_SECONDS))
        await asyncio.to_thread(end)
        await runner.cleanup()

    async def _over(self) -> None:
        """Wait until no request is being answered."""
        while self._running:
            self._all_over.clear()
            await self._all_over.wait()

    def _asking(self, endpoint: Endpoint) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def ask(request: web.Request) -> web.StreamResponse:
            content = await _body(request)
            if self.ending:
                raise ApiError(503, "the server is ending")
            self._running += 1
            try:
                return await answer(request, content, endpoint, self._models)
            finally:
                self._running -= 1
                if not self._running:
                    self._all_over.set()

        return ask

    async def _tokenize(self, request: web.Request) -> web.Response:
        return await self._of_tokens(request, tokenized)

    async def _detokenize(self, request: web.Request) -> web.Response:
        return await self._of_tokens(request, detokenized)

    async def _of_tokens(
        self, request: web.Request, made: Callable[[dict[str, Any], ServedModel], dict[str, Any]]
    ) -> web.Response:
        content = await _body(request)

        def make() -> dict[str, Any]:
            body = json_object(content)
            return made(body, self._models.named_in(body))

        return web.json_response(await asyncio.to_thread(make))

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(await self._models.as_list())

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(self._models.find(request.match_info["name"])[0].document)

    async def _health(self, request: web.Request) -> web.Response:
        """Answer 200 if there are models and `Models.health` is true of each, otherwise 503."""
        answers = await self._models.health()
        words = {name: "answers" if answered else "does not answer" for name, answered in answers.items()}
        healthy = bool(answers) and all(answers.values())
        body = {"status": "healthy" if healthy else "unhealthy", "models": words}
        return web.json_response(body, status=200 if healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._models.figures(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _nothing(self, request: web.Request) -> web.Response:
        """Raise the error of a path or a method that this server does not have."""
        first, _, rest = request.match_info["path"].partition("/")
        why = _ELSEWHERE.get(rest.partition("/")[0]) if first == "v1" else None
        if why is not None:
            raise ApiError(404, f"this server has no {request.path}: {why}")
        here = {route.resource.canonical: route.method for route in self.application.router.routes() if route.resource}
        if request.path in here:
            raise ApiError(405, f"{request.path} takes {here[request.path]} requests")
        raise ApiError(404, f"there is nothing at this path; {', '.join(one.value for one in Endpoint)} are")


async def _body(request: web.Request) -> bytes:
    try:
        content: bytes = await asyncio.wait_for(request.read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body was not complete within {BODY_SECONDS:g} seconds") from None
    return content


async def _first_of(*waited: Awaitable[object]) -> None:
    """Wait until one of these is done, and cancel the others."""
    tasks = [asyncio.ensure_future(one) for one in waited]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address, before engines are loaded; requests wait until the engines answer."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnsupportedEnvironment(f"cannot listen at {host} port {port}: {reason}", hint="--port PORT") from None


def loaded(
    name: str, path: Path, settings: ServingSettings, undo: contextlib.ExitStack, tool_parser: str | None = None
) -> tuple[ServedModel, ServedEngine]:
    """Load an engine, let it answer once, and return it with its model; `undo` closes it."""
    engine = ServedEngine.open(path, settings)
    undo.callback(engine.close)
    directory, now = engine.engine.directory, int(time.time())
    model = ServedModel.of(name, directory, engine.limits, now, tool_parser=tool_parser)
    engine.answer_once()
    return model, engine


def _ready(deployment: LightDeployment, listening: socket.socket, models: OwnModels, started: float) -> str:
    """Return the message for the user once the server is ready, with a command to try."""
    host = f"[{deployment.host}]" if ":" in deployment.host else deployment.host
    address = f"http://{host}:{listening.getsockname()[1]}/v1"
    names = ", ".join(model.name for model in models)
    lines = [f"{names}: ready at {address} after {time.monotonic() - started:.1f} s"]
    for model in models:
        tokenizer = model.tokenizer if model.template is None else None
        lines.append(curl(address, model.name, tokenizer, api_key=deployment.api_key is not None))
    return "\n".join(lines)
