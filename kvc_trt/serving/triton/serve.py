"""Run a tritonserver for engines on this machine, until Ctrl-C or SIGTERM.

It reads a temporary model repository, and listens on loopback alone, because it checks no API key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvc_trt.backends.opening import open_engine
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.cache import cache_root
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.example import example_text
from kvc_trt.serving.owners import own_directory, remove_abandoned, runs
from kvc_trt.serving.processes import Child, ask_here, asked_by_signals, until_asked
from kvc_trt.serving.triton.installation import Installation
from kvc_trt.serving.triton.repository import export_model

ADDRESS = "127.0.0.1"
_ASK_AGAIN_SECONDS = 0.1
_ASK_SECONDS = 30.0
_DRAIN_SECONDS = 30
"""The longest time that answers may still take after Ctrl-C."""
_DIRECTORY = "triton-"
_SHARED_MEMORY = Path("/dev/shm")
_REASONS = (
    re.compile(r"TritonModelException: (.*)"),
    re.compile(r"(error while loading shared libraries.*)"),
    re.compile(r"(No module named 'kvc_trt[^']*')"),
)


class Ports(NamedTuple):
    """The ports on which a server listens."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True)
class TritonDeployment:
    """The engines to serve, with the port and the settings of the server."""

    served: Sequence[tuple[str, Path]]
    """Names of models with the directories of their engines."""
    port: int = 8000
    """The port of HTTP; gRPC and metrics take the next two ports. 0 takes any three free ports."""
    settings: ServingSettings = field(default_factory=ServingSettings)


class RunningTriton:
    """A running server. `say` prints its messages to the user, line by line."""

    def __init__(self, deployment: TritonDeployment, installation: Installation, say: Callable[[str], None]) -> None:
        self._names = [name for name, _ in deployment.served]
        self._say, self._started = say, time.monotonic()
        self._ports = _ports(deployment.port)
        self._prefix = _shared_prefix(os.getpid())
        variables = installation.variables(os.environ)
        for pid in remove_abandoned(cache_root(), _DIRECTORY):
            if not runs(pid):
                _remove_shared(_shared_prefix(pid))
        # In the cache directory, which is likely on the engines' disk: then files are linked, otherwise copied.
        self._directory = own_directory(cache_root(), _DIRECTORY)
        try:
            self._questions = dict(self._export(deployment))
            command = [*installation.arguments(self._directory), *self._options()]
        except BaseException:
            self._remove()
            raise
        self._server = Child("tritonserver", command, variables, self._directory / "server.log", self._say)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Start the server, tell the user when every engine has answered, and end it on Ctrl-C or SIGTERM.

        Raises the error of a server that cannot start, or that dies too often.
        """
        with asked_by_signals(self._asked_to_end):
            keeping = asyncio.create_task(self._keep())
            try:
                await until_asked(self._stop, [keeping], self._until_ready())
            finally:
                await self._server.stop(_DRAIN_SECONDS + 10)
                await asyncio.gather(keeping, return_exceptions=True)
                self._remove()

    def _asked_to_end(self) -> None:
        if self._stop.is_set():  # a second signal: do not wait for answers
            self._server.kill()
        self._stop.set()

    async def _keep(self) -> None:
        try:
            await self._server.keep()
        except UnsupportedEnvironment as error:
            raise UnsupportedEnvironment(self._reason() or error.message, hint=error.hint) from error

    async def _until_ready(self) -> None:
        """Wait until every model has answered a request: Triton calls a model ready even if its process has died."""
        waiting = list(self._names)
        while waiting:
            reason = self._reason()
            if reason is not None:  # Triton would wait for ever for a model process that cannot start
                raise UnsupportedEnvironment(reason)
            waiting = [name for name in waiting if not await asyncio.to_thread(self._answers, name)]
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        self._server.is_ready = True
        self._say(self._ready())

    def _answers(self, name: str) -> bool:
        """Return whether a model answers a one-token request."""
        url = f"http://{ADDRESS}:{self._ports.http}/v2/models/{name}/generate"
        body = json.dumps({"input_ids": [0], "max_tokens": 1, "ignore_eos": True}).encode()
        with contextlib.suppress(OSError, ValueError):
            return "output_ids" in json.loads(ask_here(url, body, seconds=_ASK_SECONDS)[1])
        return False

    def _ready(self) -> str:
        """Return the message for the user once the server is ready, with commands to try."""
        ports, seconds = self._ports, time.monotonic() - self._started
        lines = [
            f"{', '.join(self._names)}: ready at http://{ADDRESS}:{ports.http} after {seconds:.1f} s "
            f"(gRPC {ADDRESS}:{ports.grpc}, http://{ADDRESS}:{ports.metrics}/metrics)"
        ]
        for name, question in self._questions.items():
            body = shlex.quote(json.dumps({**question, "max_tokens": 32}))
            lines.append(f"curl http://{ADDRESS}:{ports.http}/v2/models/{name}/generate -d {body}")
        return "\n".join(lines)

    def _export(self, deployment: TritonDeployment) -> list[tuple[str, dict[str, Any]]]:
        """Write the repository, and return a first request for each model by name."""
        questions: list[tuple[str, dict[str, Any]]] = []
        for name, path in deployment.served:
            engine = open_engine(path)
            export_model(engine, self._directory / "repository", name, deployment.settings)
            tokenizer = engine.tokenizer
            asked = {"input_ids": [1, 2]} if tokenizer is None else {"text_input": example_text(tokenizer)}
            questions.append((name, asked))
        return questions

    def _options(self) -> list[str]:
        ports = self._ports
        return [
            f"--model-repository={self._directory / 'repository'}", "--model-control-mode=none",
            f"--http-address={ADDRESS}", f"--grpc-address={ADDRESS}", f"--http-port={ports.http}",
            f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}", "--disable-auto-complete-config",
            "--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0", f"--exit-timeout-secs={_DRAIN_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
        ]  # fmt: skip

    def _reason(self) -> str | None:
        """Return the reason in the server's log why it cannot load the models; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            log = self._server.log.read_text(errors="replace")
            for pattern in _REASONS:
                found = pattern.search(log)
                if found is not None:
                    return f"tritonserver cannot load the models: {found[1].strip()}"
        return None

    def _remove(self) -> None:
        """Remove the server's directory, and the shared memory that it leaves behind if it was killed."""
        shutil.rmtree(self._directory, ignore_errors=True)
        _remove_shared(self._prefix)


def _shared_prefix(pid: int) -> str:
    """Return the prefix of the names of shared memory of the server that a process runs."""
    return f"kvc_{pid}_"


def _remove_shared(prefix: str) -> None:
    for left in _SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's
            left.unlink()


def _ports(first: int) -> Ports:
    """Return three free ports: `first` and the next two, or any for 0; UnsupportedEnvironment if one is taken."""
    wanted = (0, 0, 0) if first == 0 else (first, first + 1, first + 2)
    with contextlib.ExitStack() as stack:
        found = []
        for port in wanted:
            probe = stack.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ADDRESS, port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise UnsupportedEnvironment(
                    f"cannot listen at {ADDRESS} port {port}: {reason}", hint="--port PORT"
                ) from None
            found.append(int(probe.getsockname()[1]))
    return Ports(*found)


def serve_triton(deployment: TritonDeployment, installation: Installation, say: Callable[[str], None]) -> None:
    """Run a server until Ctrl-C or SIGTERM."""
    running = RunningTriton(deployment, installation, say)
    asyncio.run(running.run())
