"""`kvc-trt serve` in the environment of Dynamo, as a user runs it, and a client that needs no library."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path(os.environ.get("KVC_TRT_DYNAMO", ROOT / "build" / "dynamo")) / "bin" / "python"
"""Made by `make dynamo-env`."""
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
READY_SECONDS = 300
LONG = 8000
"""Tokens of an answer that is not over before something else is done: seconds, where 500 tokens are 0.4."""


def require_environment() -> None:
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: make dynamo-env")


class Served:
    """A running `kvc-trt serve`: the light server by `python`, or by None NVIDIA Dynamo in its environment."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None, python: Path | None = None) -> None:
        if python is None:
            require_environment()
            python, arguments = PYTHON, ("--dynamo", *arguments)
        quick = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0", "DYN_PREFILL_DRAIN_TIMEOUT_S": "2"}
        self.process = subprocess.Popen(
            [str(python), "-m", "kvc_trt", "serve", *arguments],
            env={**os.environ, "PYTHONPATH": PATHS, **quick, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def until(self, said: str, seconds: float = READY_SECONDS) -> str:
        """Wait for a line that holds `said`, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in tuple(self.lines):
                if said in line:
                    return line
            assert self.process.poll() is None, self.lines
            time.sleep(0.05)
        raise AssertionError(f"{said!r} was not said: {self.lines}")

    def client(self, key: str | None = None) -> Client:
        line = self.until("at http://")
        port = int(line.partition("http://")[2].partition("/")[0].rpartition(":")[2])
        return Client(port, key)

    def children(self, part: str) -> list[psutil.Process]:
        """Processes below this one whose command line holds `part`."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in found if any(part in argument for argument in one.cmdline())]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and return its exit code."""
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(120)
        self._reader.join(60)
        _, left = psutil.wait_procs(below, timeout=60)
        assert left == [], "no process is left behind"
        return code


class Client:
    """Requests to one server."""

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port, self.key = port, key

    def open(self, path: str, body: object = None, *, content: bytes | None = None) -> http.client.HTTPConnection:
        """Send a request, and return the connection it was sent on."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        sent = content if content is not None or body is None else json.dumps(body).encode()
        connection.request("GET" if sent is None else "POST", path, sent, headers)
        return connection

    def ask(self, path: str, body: object = None, *, content: bytes | None = None) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        connection = self.open(path, body, content=content)
        try:
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode()

    def complete(self, model: str, prompt: object, **more: object) -> dict[str, Any]:
        """Return the answer to a prompt, which must succeed."""
        status, answer = self.ask("/v1/completions", {"model": model, "prompt": prompt, **more})
        assert status == 200, answer
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer; the end mark must come."""
        connection = self.open(path, {**body, "stream": True})
        try:
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            ended = False
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    ended = True
                elif line.startswith(b"data: "):
                    yield json.loads(line[6:])
            assert ended
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's lines that have these labels."""
        _, text = self.ask("/metrics")
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.partition("{")[0] == name and all(one in line for one in wanted)
        )


def eventually(holds: Any, seconds: float = 60.0) -> None:
    """Wait until `holds()` is true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)
