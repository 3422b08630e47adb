"""The processes of a server: started, watched and ended by their id."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

READY_SECONDS, END_SECONDS = 120.0, 60.0


class Started:
    """One process with its log, and all that it starts."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as written:
            self.process = subprocess.Popen(
                list(command), env=dict(variables), stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`; SystemExit with the end of the log where the process ends, or it takes too long."""
        deadline = time.monotonic() + READY_SECONDS
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"error: the server is not ready:\n{self.log[-4000:]}")
            time.sleep(0.05)

    def tree(self) -> list[psutil.Process]:
        """Return the process and all below it, while it runs."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def end(self) -> None:
        """Ask it to end as an operator would, then kill the processes that are left."""
        below = self.tree()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(below, timeout=5)
        for one in left:
            one.kill()


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nothing listens at."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def read_metric(url: str, name: str) -> float:
    """Return the sum of a metric's lines at an address that shows Prometheus text; 0 where there is none."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)
