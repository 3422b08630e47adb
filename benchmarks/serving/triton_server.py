"""A real tritonserver on loopback, from the wheel in the environment of `make triton-env`, with one exported engine."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from pathlib import Path

from benchmarks.serving.place import Place
from benchmarks.serving.processes import Started, free_ports, read_metric

_SHARED_MEMORY = Path("/dev/shm")


class TritonServer:
    """One server with one model; `end` it."""

    def __init__(self, place: Place, repository: Path, directory: Path) -> None:
        self.http, self.grpc, self._metrics = free_ports(3)
        self._prefix = f"kvc_bench_{self.http}_"
        (site,) = (place.triton / "lib").glob("python3.*/site-packages")
        server = site / "pytriton" / "tritonserver"
        variables = place.variables()
        variables["PATH"] = f"{place.triton / 'bin'}:/usr/bin:/bin"
        variables["LD_LIBRARY_PATH"] = str(_shared_python(place))
        self._started = Started(
            [
                str(server / "bin" / "tritonserver"), f"--model-repository={repository}",
                f"--backend-directory={_backends(directory, server, site)}",
                "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
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
        """What makes up the server."""
        return [self._started]

    def metric(self, name: str) -> float:
        """Return the sum of a metric's lines; 0 for one that it does not have."""
        return read_metric(f"http://127.0.0.1:{self._metrics}/metrics", name)

    def end(self) -> None:
        """End it, and remove what it leaves in shared memory."""
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


def _shared_python(place: Place) -> Path:
    """Return the directory of the shared libpython of Triton's environment, without which it runs no Python model."""
    asked = "import sysconfig as s; print(s.get_config_var('Py_ENABLE_SHARED'), s.get_config_var('LIBDIR'))"
    shared, directory = subprocess.check_output([place.triton / "bin" / "python", "-c", asked], text=True).split()
    if shared != "1":
        raise SystemExit(f"error: the Python of {place.triton} has no shared libpython, which Triton needs")
    return Path(directory)


def _backends(directory: Path, server: Path, site: Path) -> Path:
    """Make a directory with Triton's Python backend and its stub for the environment's Python."""
    python = directory / "backends" / "python"
    shutil.rmtree(python, ignore_errors=True)
    python.mkdir(parents=True)
    version = site.parent.name.removeprefix("python")
    for file in (
        server / "backends" / "python" / "libtriton_python.so",
        server / "backends" / "python" / "triton_python_backend_utils.py",
        server / "python_backend_stubs" / version / "triton_python_backend_stub",
    ):
        (python / file.name).symlink_to(file)
    return python.parent
