"""Run Dynamo's processes on this machine: a frontend behind our gateway, and a worker for each engine.

They find each other through files in one directory, the store, without any further service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.models.sources.tokenizer import read_tokenizer
from kvc_trt.serving import example
from kvc_trt.serving.dynamo.environment import process_environment, require_dynamo
from kvc_trt.serving.dynamo.model_directory import TEMPLATE_FILE
from kvc_trt.serving.dynamo.records import forget_dead, read_record, status_urls
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.owners import own_directory, remove_abandoned
from kvc_trt.serving.processes import Child, ask_here, asked_by_signals, until_asked

if TYPE_CHECKING:
    from kvc_trt.serving.dynamo.gateway import Gateway

Role = Literal["aggregated", "frontend", "prefill", "decode"]
FRONTEND_HOST = "127.0.0.1"
"""The frontend's address, local even if the gateway's is not: the frontend checks no API key."""
ASK_AGAIN_SECONDS = 0.1
_OPTIONS = ("rows", "queue_limit", "prefill_slice_ms", "threads", "backend")
"""The settings that are passed to a worker as command-line options."""
_STORE = "kvc-trt-serve-"
_STATUS_PORTS = range(20000, 32768)
"""The range of status ports; Dynamo accepts none above 32767."""


@dataclass(frozen=True)
class DeployedEngine:
    """An engine and the name under which requests ask for it."""

    name: str
    engine: Path


@dataclass(frozen=True)
class Deployment:
    """The engines to serve with Dynamo, the role of this machine's processes, and their settings."""

    served: Sequence[DeployedEngine]
    role: Role = "aggregated"
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    api_key: str | None = None
    origins: Sequence[str] = ()
    """Origins whose pages may send requests from a browser; `*` stands for any."""
    store: Path | None = None
    """The directory through which processes find each other; None makes a new one for these processes."""
    settings: ServingSettings = field(default_factory=ServingSettings)
    tool_parser: str | None = None
    """The name of the form of tool calls, for all models; None takes each model's from its chat template."""

    @property
    def has_frontend(self) -> bool:
        """True if this deployment runs the frontend and its gateway, to which clients connect."""
        return self.role in ("aggregated", "frontend")


class Running:
    """A running deployment. `say` prints its messages to the user, line by line."""

    def __init__(self, deployment: Deployment, say: Callable[[str], None]) -> None:
        require_dynamo()
        self._deployment, self._say = deployment, say
        self._started, self._stop = time.monotonic(), asyncio.Event()
        self._workers: dict[str, Child] = {}
        self._own_store = deployment.store is None
        self._store = _new_store() if deployment.store is None else deployment.store.absolute()
        try:
            self._prepare(deployment)
        except BaseException:
            self._remove_store()
            raise

    def _prepare(self, deployment: Deployment) -> None:
        for name in ("found", "home", "models", "workers", "logs"):
            (self._store / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        forget_dead(self._store / "workers")
        self._frontend_port = _free_port()
        self._status_ports: dict[str, int] = {}
        self._gateway: Gateway | None = None
        self._frontend: Child | None = None
        self._workers = {one.name: self._worker(one) for one in deployment.served}
        if deployment.has_frontend:
            from kvc_trt.serving.dynamo.gateway import Gateway
            from kvc_trt.serving.dynamo.remote_models import RemoteModels

            models = RemoteModels(
                f"http://{FRONTEND_HOST}:{self._frontend_port}",
                self._store / "models",
                list(self._workers),
                lambda: status_urls(self._store / "workers"),
            )
            self._gateway = Gateway(models, deployment.api_key, deployment.origins)
            self._frontend = self._new_frontend()

    async def run(self) -> None:
        """Start all processes, tell the user when they answer, and end them on Ctrl-C or SIGTERM.

        Raises the error of a process that cannot start, or that dies too often.
        """
        children = [child for child in (self._frontend, *self._workers.values()) if child is not None]
        tasks: list[asyncio.Task[None]] = []
        with asked_by_signals(self._asked_to_end):
            try:
                port = await self._listen()
                tasks = [asyncio.create_task(child.keep()) for child in children]
                await until_asked(self._stop, tasks, self._until_ready(port))
            finally:
                await self._end()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _asked_to_end(self) -> None:
        if self._stop.is_set():  # a second signal: do not wait for answers
            for child in (*self._workers.values(), self._frontend):
                if child is not None:
                    child.kill()
        self._stop.set()

    async def _listen(self) -> int:
        if self._gateway is None:
            return 0
        host, port = self._deployment.host, self._deployment.port
        try:
            return await self._gateway.listen(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnsupportedEnvironment(f"cannot listen at {host} port {port}: {reason}", hint="--port PORT") from None

    async def _until_ready(self, port: int) -> None:
        """Wait until every worker and the frontend answer; a model's entry in the frontend's list does not prove it."""
        waiting = dict(self._workers)
        while waiting or not await self._frontend_answers():
            for name, child in tuple(waiting.items()):
                if await self._works(name, child):
                    child.is_ready = True
                    del waiting[name]
            await asyncio.sleep(ASK_AGAIN_SECONDS)
        if self._frontend is not None:
            self._frontend.is_ready = True
        self._say(self._ready(port))

    async def _works(self, name: str, child: Child) -> bool:
        if self._gateway is not None:
            return await self._gateway.models.answers(name)
        return await asyncio.to_thread(_is_live, self._status_ports[child.name])

    async def _frontend_answers(self) -> bool:
        if self._frontend is None:
            return True
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(FRONTEND_HOST, self._frontend_port)
            writer.close()
            return True
        return False

    async def _end(self) -> None:
        """Refuse new requests, let the workers finish their answers, then end the frontend: so no answer is lost."""
        if self._gateway is not None:
            await self._gateway.refuse_newcomers()
        await asyncio.gather(*(child.stop() for child in self._workers.values()))
        if self._frontend is not None:
            await self._frontend.stop()
        if self._gateway is not None:
            await self._gateway.close()
        self._remove_store()

    def _remove_store(self) -> None:
        if self._own_store:
            shutil.rmtree(self._store, ignore_errors=True)
            return
        for child in self._workers.values():  # other deployments use the rest of the store
            self._record(child.name).unlink(missing_ok=True)
            child.log.unlink(missing_ok=True)

    def _ready(self, port: int) -> str:
        """Return the message for the user once everything is ready, with commands to try."""
        deployment, seconds = self._deployment, time.monotonic() - self._started
        if self._gateway is None:
            names = ", ".join(self._workers)
            return f"{names}: the {deployment.role} worker is ready after {seconds:.1f} s"
        host = f"[{deployment.host}]" if ":" in deployment.host else deployment.host
        address = f"http://{host}:{port}/v1"
        if not self._workers:
            return f"the frontend listens at {address}; it answers once workers have joined"
        lines = [f"{', '.join(self._workers)}: ready at {address} after {seconds:.1f} s"]
        for name in self._workers:
            lines.append(curl(address, name, self._store / "models" / name, api_key=deployment.api_key is not None))
        return "\n".join(lines)

    def _worker(self, served: DeployedEngine) -> Child:
        deployment = self._deployment
        name = served.name if deployment.role == "aggregated" else f"{served.name}-{deployment.role}-{os.getpid()}"
        arguments = [str(served.engine.absolute()), "--name", served.name, "--role", deployment.role]
        arguments += ["--model", str(self._store / "models" / served.name), "--record", str(self._record(name))]
        arguments += [] if deployment.tool_parser is None else ["--tool-parser", deployment.tool_parser]
        settings = deployment.settings
        for option in _OPTIONS:
            value = getattr(settings, option)
            if value is not None:
                arguments += [f"--{option.replace('_', '-')}", str(value)]
        arguments += ["--kv-proofs"] if settings.kv_proofs else []
        arguments += ["--sealed"] if settings.sealed else []
        port = self._status_ports[name] = _free_port(_STATUS_PORTS)
        environment = {**process_environment(self._store), "DYN_SYSTEM_PORT": str(port)}
        command = [sys.executable, "-m", "kvc_trt.serving.dynamo.worker", *arguments]
        log = self._store / "logs" / f"{name}.worker.log"  # an engine may be called "frontend"
        return Child(name, command, environment, log, lambda said: self._died(name, said))

    def _new_frontend(self) -> Child:
        command = [sys.executable, "-m", "dynamo.frontend", *self._frontend_options()]
        log = self._store / "logs" / "frontend.log"
        return Child("frontend", command, process_environment(self._store), log, self._say)

    def _died(self, name: str, said: str) -> None:
        """Remove Dynamo's record of a worker that has died, which would attract requests for ten more seconds."""
        self._say(said)
        written = read_record(self._record(name))
        if written is not None:
            for record in self._store.glob(f"found/*/*/*%2F{written.number:x}"):
                record.unlink(missing_ok=True)
            self._record(name).unlink(missing_ok=True)

    def _record(self, name: str) -> Path:
        return self._store / "workers" / name

    def _frontend_options(self) -> list[str]:
        return ["--http-host", FRONTEND_HOST, "--http-port", str(self._frontend_port), "--router-mode", "round-robin"]


def _new_store() -> Path:
    """Make a new store for these processes, and remove the stores of deployments that were killed."""
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent, _STORE)
    return own_directory(parent, _STORE)


def curl(address: str, name: str, model: Path, *, api_key: bool) -> str:
    """Return a command that sends a first request to a model; `model` is the directory that the frontend reads."""
    chat = (model / TEMPLATE_FILE).exists()
    tokenizer = None if chat else read_tokenizer(model / "tokenizer.json")
    return example.curl(address, name, tokenizer, api_key=api_key)


def _is_live(port: int) -> bool:
    """Return whether a worker's status port reports that it serves its endpoint."""
    with contextlib.suppress(OSError):
        return ask_here(f"http://127.0.0.1:{port}/health", seconds=5)[0] == 200
    return False


def _free_port(among: range | None = None) -> int:
    """Return a port of this machine that is free now."""
    for port in (0,) if among is None else random.sample(among, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((FRONTEND_HOST, port))
            found: int = probe.getsockname()[1]
            return found
    raise UnsupportedEnvironment("no port is free for a worker's status")
