"""The server of a run, `kvc-trt serve` with two engines in the environment of `make dynamo-env`, and the code that ends
it."""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil

from benchmarks.serving.place import Place
from benchmarks.serving.processes import Started

_ADDRESS = re.compile(r"at http://127\.0\.0\.1:(\d+)/")
_COMES_BACK_SECONDS = 120.0
ROWS = 4


class Server:
    """The processes behind one port: the gateway, the frontend, and a worker for each engine."""

    def __init__(self, place: Place, engines: Mapping[str, Path], directory: Path) -> None:
        variables = {**place.variables(), "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}
        named = [f"{name}={path}" for name, path in engines.items()]
        options = ["--port", "0", "--rows", str(ROWS), "--queue", "16", "--threads", "1"]
        command = [str(place.dynamo / "bin" / "python"), "-m", "kvc_trt", "serve", "--dynamo", *named, *options]
        self._engines = tuple(engines)
        self._started = Started(command, variables, directory / "serve.log")
        self._started.until(lambda: _ADDRESS.search(self._started.log) is not None)
        found = _ADDRESS.search(self._started.log)
        assert found is not None, "it was there"
        self.port = int(found[1])

    def processes(self) -> dict[str, psutil.Process]:
        """Return the processes that run now, by role."""
        found = {}
        for process in self._started.tree():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                found[self._role(process.cmdline())] = process
        return found

    def _role(self, command: list[str]) -> str:
        if "kvc_trt.serving.dynamo.worker" in command:
            return f"worker of {command[command.index('--name') + 1]}"
        return "frontend" if "dynamo.frontend" in command else "gateway"

    def kill(self, role: str) -> float:
        """End a process by SIGKILL; return the seconds until every engine answers again, or SystemExit if none does."""
        began = time.monotonic()
        self.processes()[role].kill()
        time.sleep(0.2)
        while not self.is_healthy():
            if time.monotonic() - began > _COMES_BACK_SECONDS:
                raise SystemExit(f"error: {role} did not come back:\n{self._started.log[-2000:]}")
            time.sleep(0.2)
        return time.monotonic() - began

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the workers' own figures by engine: each metric's sum over its kinds."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, dict[str, float]] = {name: {} for name in self._engines}
        for line in lines:
            name, brace, rest = line.partition("{")
            if not name.startswith("kvc_trt_") or not brace:
                continue
            labels, _, value = rest.rpartition("} ")
            for engine, counted in found.items():
                if f'model="{engine}"' in labels:
                    counted[name] = counted.get(name, 0.0) + float(value)
        return found

    def end(self) -> int:
        """Ask it to end; return its exit code."""
        self._started.end()
        return int(self._started.process.returncode)
