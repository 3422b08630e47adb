"""A real tritonserver on loopback, from the environment that `make triton-env` makes, for one test run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.processes import free_ports
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.serving.triton.installation import ENVIRONMENT as VARIABLE
from kvc_trt.serving.triton.installation import Installation, find_triton

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = Path(os.environ.get(VARIABLE, ROOT / "build" / "triton"))
PYTHON = ENVIRONMENT / "bin" / "python"
START_SECONDS, STOP_SECONDS = 300.0, 120.0
_FAILED = re.compile(r"error while loading shared libraries|failed to load|^error", re.MULTILINE)
SHARED_MEMORY = Path("/dev/shm")
NO_REPLY = 0
"""The status of a request whose connection was refused or closed."""


@dataclass(frozen=True)
class Reply:
    """An answer of HTTP."""

    status: int
    body: Any
    """A parsed JSON reply; a stream's events as a list."""


class TritonServer:
    """One server process. `stop` ends it and checks that nothing is left."""

    def __init__(self, repository: Path, directory: Path, *options: str) -> None:
        self.killed = False
        """True once a caller has asked for its end by force, whatever the server had come to by then."""
        self.http, self.grpc, self._metrics = free_ports(3)
        self._prefix = f"kvc_{os.getpid()}_{self.http}_"
        self._log = directory / "server.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *_installation().arguments(directory), f"--model-repository={repository}",
                    "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
                    f"--http-port={self.http}", f"--grpc-port={self.grpc}", f"--metrics-port={self._metrics}",
                    "--disable-auto-complete-config", "--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0",
                    "--exit-timeout-secs=10", f"--backend-config=python,shm-region-prefix-name={self._prefix}",
                    *options,
                ],
                env=_variables(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until every model has answered its first request."""
        deadline = time.monotonic() + START_SECONDS
        while self._get("v2/health/ready").status != 200:
            failed = self.process.poll() is not None or _FAILED.search(self.log)
            if failed or time.monotonic() > deadline:
                raise AssertionError(f"the server is not ready:\n{self.log[-6000:]}")
            time.sleep(0.05)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def generate(self, model: str, timeout: float = 300.0, **fields: object) -> Reply:
        return self._post(f"v2/models/{model}/generate", json.dumps(fields).encode(), timeout)

    def post(self, path: str, body: bytes = b"{}") -> Reply:
        return self._post(path, body, 300.0)

    def stream(self, model: str, **fields: object) -> list[dict[str, Any]]:
        """Return the events of /generate_stream."""
        with self.open_stream(model, **fields) as response:
            lines = response.read().decode("utf-8").splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    def open_stream(self, model: str, **fields: object) -> Any:
        url = f"http://127.0.0.1:{self.http}/v2/models/{model}/generate_stream"
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(fields).encode()), timeout=300)

    def metric(self, name: str, **labels: str) -> float:
        """Return one of the model's figures; 0 for one that has never grown."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if line.startswith(f"{name}{{") and all(one in line for one in wanted)]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    def stop(self, *, expected: int = 0) -> None:
        """End it as an operator would, and check that it has left nothing in shared memory."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            assert self.process.wait(STOP_SECONDS) == expected, self.log[-6000:]
            assert self.left_in_memory() == []
        finally:
            self.kill()

    def kill(self) -> None:
        """End the server whatever it is doing, and remove the files that it then leaves."""
        self.killed = True
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for left in SHARED_MEMORY.glob(f"{self._prefix}*"):
            left.unlink(missing_ok=True)

    def left_in_memory(self) -> list[str]:
        return [path.name for path in SHARED_MEMORY.glob(f"{self._prefix}*")]

    def stubs(self) -> list[int]:
        """Return the processes in which Python models run."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted({int(pid) for file in children for pid in file.read_text().split()})

    def kill_stubs(self) -> None:
        for pid in self.stubs():
            os.kill(pid, signal.SIGKILL)

    def _get(self, path: str) -> Reply:
        return self._ask(urllib.request.Request(f"http://127.0.0.1:{self.http}/{path}"), 5.0)

    def _post(self, path: str, body: bytes, timeout: float) -> Reply:
        return self._ask(urllib.request.Request(f"http://127.0.0.1:{self.http}/{path}", body), timeout)

    @staticmethod
    def _ask(request: urllib.request.Request, timeout: float) -> Reply:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                content = response.read()
                return Reply(response.status, json.loads(content) if content else None)
        except urllib.error.HTTPError as error:
            content = error.read()
            with contextlib.suppress(ValueError):
                return Reply(error.code, json.loads(content))
            return Reply(error.code, content.decode(errors="replace"))
        except (ConnectionError, urllib.error.URLError):
            return Reply(NO_REPLY, None)


def check_environment() -> None:
    """Skip where Python has no shared library, which the server cannot do without; fail where `make` was not run."""
    assert PYTHON.exists(), f"{ENVIRONMENT} is missing: make triton-env"
    try:
        _variables()
    except UnsupportedEnvironment as error:
        if "shared libpython" not in error.message:
            raise
        pytest.skip(f"SKIPPED ALL TESTS OF TRITON: {error.message}")


@contextlib.contextmanager
def serving(repository: Path, directory: Path, *options: str) -> Iterator[TritonServer]:
    """Run a server until the end of the block, then stop it and check that nothing is left."""
    check_environment()
    server = TritonServer(repository, directory, *options)
    try:
        server.wait_ready()
        yield server
        if not server.killed:
            server.stop()
    finally:
        server.kill()


def grpc(
    server: TritonServer,
    model: str,
    requests: list[tuple[str, dict[str, Any]]],
    leave_after: int | None = None,
    leave_with: Sequence[str] = (),
    timeout: int | None = None,
) -> list[dict[str, Any]]:
    """Ask over one stream, in a process with Triton's client library (`grpc_client.py` says when it leaves)."""
    asked = {
        "url": f"127.0.0.1:{server.grpc}", "model": model, "leave_after": leave_after, "leave_with": leave_with,
        "requests": [{"id": name, "fields": fields, "timeout": timeout} for name, fields in requests],
    }  # fmt: skip
    client = ROOT / "tests" / "serving" / "triton" / "grpc_client.py"
    done = subprocess.run([PYTHON, client], input=json.dumps(asked), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    came: list[dict[str, Any]] = json.loads(done.stdout)
    return came


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until something is true; the limit only ends a hang, on a busy machine too."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _installation() -> Installation:
    return find_triton({VARIABLE: str(ENVIRONMENT)})


def _variables() -> dict[str, str]:
    """Return the environment variables that a server needs, and no others of this process.

    It runs bodies or native operators as this process does: a real model's answers may differ between the two.
    """
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "KVC_TRT_CPU_KERNELS") if name in os.environ}
    return {**_installation().variables(kept), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
