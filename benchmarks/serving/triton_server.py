"""A real tritonserver on loopback, from the wheel in the environment of `make triton-env`, with one exported engine."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from pathlib import Path

from benchmarks.serving.place import Place
from benchmarks.serving.processes import Started, free_ports, read_metric
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.serving.triton.installation import ENVIRONMENT, find_triton

_SHARED_MEMORY = Path("/dev/shm")


class TritonServer:
    """One server with one model; `end` it."""

    def __init__(self, place: Place, repository: Path, directory: Path) -> None:
        self.http, self.grpc, self._metrics = free_ports(3)
        self._prefix = f"kvc_bench_{self.http}_"
        shutil.rmtree(directory / "backends", ignore_errors=True)  # of an earlier run
        try:
            installation = find_triton({ENVIRONMENT: str(place.triton)})
            command, variables = installation.arguments(directory), installation.variables(place.variables())
        except UnsupportedEnvironment as error:
            raise SystemExit(f"error: {error.message}; {error.hint}") from error
        self._started = Started(
            [
                *command, f"--model-repository={repository}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
                f"--http-port={self.http}", f"--grpc-port={self.grpc}", f"--metrics-port={self._metrics}",
                "--disable-auto-complete-config", "--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0",
                "--exit-timeout-secs=30", f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            ],
            variables, directory / "server.log",
        )  # fmt: skip

    def wait_ready(self) -> None:
        self._started.until(self._is_ready)

    @property
    def started(self) -> list[Started]:
        """The processes that make up the server."""
        return [self._started]

    def metric(self, name: str) -> float:
        """Return the sum of a metric's lines; 0 for one that it does not have."""
        return read_metric(f"http://127.0.0.1:{self._metrics}/metrics", name)

    def end(self) -> None:
        """End it, and remove its leftovers in shared memory."""
        self._started.end()
        for left in _SHARED_MEMORY.glob(f"{self._prefix}*"):
            left.unlink(missing_ok=True)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def export(place: Place, engine: Path, name: str, repository: Path, options: list[str]) -> None:
    """Write the engine's model repository anew, as a user does."""
    shutil.rmtree(repository, ignore_errors=True)
    command = [str(place.triton / "bin" / "python"), "-m", "kvc_trt", "export", "triton", str(engine)]
    command += ["-o", str(repository), "--name", name, *options]
    done = subprocess.run(command, env=place.variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: kvc-trt export triton: {done.stderr.strip()}")
