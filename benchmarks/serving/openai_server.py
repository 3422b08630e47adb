"""`kvc-trt serve` on loopback: the light server, or Dynamo in its environment, in one process or one for each role."""

from __future__ import annotations

import re
import shutil
import sys
import urllib.request
from functools import partial
from pathlib import Path

from benchmarks.serving.place import Place
from benchmarks.serving.points import Server
from benchmarks.serving.processes import Started, read_metric

_ADDRESS = re.compile(r"at (http://127\.0\.0\.1:\d+)/")
NAME = "model"
"""The model name that requests use."""


class OpenAIServer:
    """The light server; Dynamo's frontend behind our gateway, and a worker, or one for each of prefill and decode."""

    def __init__(self, place: Place, engine: Path, directory: Path, rows: int, server: Server) -> None:
        python = sys.executable if server == "light" else str(place.dynamo / "bin" / "python")
        self._command = [python, "-m", "kvc_trt", "serve", *(["--dynamo"] if server == "dynamo" else [])]
        self._variables = place.variables()
        self._variables["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
        self._directory, self._store = directory, directory / "store"
        self.url = ""
        """The server's address, once it is ready."""
        shutil.rmtree(self._store, ignore_errors=True)
        served = [f"{NAME}={engine}", "--rows", str(rows)]
        if server == "apart":
            # Each worker has as many threads as its share of the cores, or they would take turns at all of them.
            worker = [*served, "--threads", "1"]
            self.started = [
                self._start("frontend", ["--role", "frontend", "--port", "0"]),
                self._start("prefill", ["--role", "prefill", *worker]),
                self._start("decode", ["--role", "decode", *worker]),
            ]
        else:
            self.started = [self._start("whole", [*served, "--port", "0"])]

    def wait_ready(self) -> None:
        frontend, *workers = self.started
        frontend.until(lambda: _ADDRESS.search(frontend.log) is not None)
        found = _ADDRESS.search(frontend.log)
        assert found is not None, "it was there"
        self.url = found[1]
        for worker in workers:
            worker.until(partial(_is_ready, worker))
        frontend.until(self._is_healthy)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's lines; 0 for one that it does not have."""
        return read_metric(f"{self.url}/metrics", name)

    def end(self) -> None:
        for one in reversed(self.started):
            one.end()

    def _start(self, name: str, arguments: list[str]) -> Started:
        command = [*self._command, *arguments]
        if "--role" in arguments:
            command += ["--store", str(self._store)]
        return Started(command, self._variables, self._directory / f"{name}.log")

    def _is_healthy(self) -> bool:
        """Return True if the engine answers, through prefill and decode where they are apart."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def _is_ready(worker: Started) -> bool:
    return "worker is ready" in worker.log
