"""One run: quiet answers first, then clients and kills beside each other, and looks at the server while it is idle."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak import catalogue
from benchmarks.soak.catalogue import CHAT, TINY, Asked
from benchmarks.soak.clients import TIMEOUT, Answer, Client, ask
from benchmarks.soak.memory import MemoryWatch
from benchmarks.soak.outcomes import Outcomes
from benchmarks.soak.server import ROWS, Server

GAUGES = ("kvc_trt_waiting", "kvc_trt_joining", "kvc_trt_running", "kvc_trt_staying")
_KILLED = (f"worker of {TINY}", f"worker of {CHAT}", "frontend")
_BETWEEN_KILLS = (45.0, 75.0)
"""Seconds; three deaths of one process within a minute end a deployment, as no accident."""
_WITH_KILLS, _WARM_UP, _CHECKPOINTS = 0.4, 0.1, 12
"""The share of the time in which processes are killed, the share after it that memory takes to settle, and how often
the server is left in peace."""
_IDLE_SECONDS = 30.0
"""The most time that the workers may take to become idle."""
_TRIES = 5
"""The number of times that an engine's rows are counted before fewer than all are reported."""


@dataclass
class Record:
    """The findings of a run so far."""

    outcomes: Outcomes = field(default_factory=Outcomes)
    kills: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "requests": {kind: dict(counted) for kind, counted in sorted(self.outcomes.counts.items())},
            "examples": self.outcomes.examples,
            "kills": self.kills,
            "checkpoints": self.checkpoints,
            "memory": self.memory,
        }


def quiet_answers(port: int, seed: int) -> list[tuple[Asked, Answer]]:
    """Ask everything one by one, whole and as a stream; SystemExit where the two differ."""
    found = []
    for asked in catalogue.requests(seed):
        whole = ask(port, asked, stream=False)
        if whole.error is not None or ask(port, asked, stream=True).text != whole.text:
            raise SystemExit(f"error: a quiet server answers {asked} by {whole}, and not as a stream")
        found.append((asked, whole))
    return found


class Soak:
    """Clients of one server for `minutes` minutes. `write` is called with each new state of the record."""

    def __init__(
        self,
        server: Server,
        minutes: float,
        seed: int,
        clients: int,
        pause_seconds: float,
        write: Callable[[Record], None],
    ) -> None:
        self._server, self._seconds, self._write = server, 60 * minutes, write
        self._draw = random.Random(seed)
        self.record = Record()
        self._may_ask = threading.Event()
        quiet = quiet_answers(server.port, seed)
        self._clients = [
            Client(
                server.port, self._of_engine(quiet, number), self.record.outcomes, seed + number,
                may_ask=self._may_ask, pause_seconds=pause_seconds,
            )
            for number in range(clients)
        ]  # fmt: skip
        self._watch = MemoryWatch(server.processes)

    @staticmethod
    def _of_engine(quiet: Sequence[tuple[Asked, Answer]], number: int) -> list[tuple[Asked, Answer]]:
        """Return the requests of a client; every fourth one chats, since the chat model is far larger."""
        wanted = CHAT if number % 4 == 3 else TINY
        return [one for one in quiet if one[0].body["model"] == wanted]

    def run(self) -> Record:
        began = time.monotonic()
        for thread in (*self._clients, self._watch):
            thread.start()
        self._may_ask.set()
        next_look = next_kill = began
        settled = self._seconds * (_WITH_KILLS + _WARM_UP)
        while (now := time.monotonic()) < began + self._seconds:
            if now >= next_look:
                self._look(now - began, settled)
                next_look = now + self._seconds / _CHECKPOINTS
            if now >= next_kill and now < began + self._seconds * _WITH_KILLS:
                self._kill(now - began)
                next_kill = time.monotonic() + self._draw.uniform(*_BETWEEN_KILLS)
            time.sleep(0.1)
        for client in self._clients:
            client.ending = True
        self._look(time.monotonic() - began, settled)
        self._watch.ending.set()
        return self.record

    def _kill(self, at: float) -> None:
        role = _KILLED[len(self.record.kills) % len(_KILLED)]
        self.record.outcomes.down()
        seconds = self._server.kill(role)
        self.record.outcomes.up()
        self.record.kills.append({"at": round(at, 1), "process": role, "answers_after_seconds": round(seconds, 1)})

    def _look(self, at: float, settled: float) -> None:
        """Let all clients pause, and see that nothing is left of their requests."""
        self._may_ask.clear()
        for client in self._clients:
            client.idle.wait(2 * TIMEOUT)
        figures = self._when_idle()
        rows = {name: self._rows_that_can_be_taken(name) for name in figures}
        self.record.checkpoints.append(
            {
                "at": round(at, 1),
                "left": {name: sum(one.get(gauge, 0.0) for gauge in GAUGES) for name, one in figures.items()},
                "without_an_end": {
                    name: one.get("kvc_trt_submitted_total", 0.0) - one.get("kvc_trt_ended_total", 0.0)
                    for name, one in figures.items()
                },
                "rows_taken_at_once": rows,
            }
        )
        self.record.memory = self._watch.figures(settled)
        self._write(self.record)
        self._may_ask.set()

    def _when_idle(self) -> dict[str, dict[str, float]]:
        """Return the workers' figures once they are idle, or after a while as they are."""
        deadline = time.monotonic() + _IDLE_SECONDS
        while True:
            figures = self._server.figures()
            idle = all(one.get(gauge, 1.0) == 0 for one in figures.values() for gauge in GAUGES)
            if idle or time.monotonic() > deadline:
                return figures
            time.sleep(0.2)

    def _rows_that_can_be_taken(self, engine: str) -> int:
        """Return the most rows of an engine that were taken at once in a few tries; a row that leaked is missing.

        On a busy machine, short answers end before all rows are taken.
        """
        most = 0
        for _ in range(_TRIES):
            most = max(most, self._rows_at_once(engine))
            if most == ROWS:
                break
        return most

    def _rows_at_once(self, engine: str) -> int:
        """Return how many rows of an engine are taken at once, that of a prompt being read included.

        More than fit are asked for, so that others wait for each that ends.
        """
        asked = catalogue.long_request(engine)
        most = 0.0
        with ThreadPoolExecutor(ROWS + 2) as threads:
            answers = [threads.submit(ask, self._server.port, asked, stream=False) for _ in range(ROWS + 2)]
            while not all(one.done() for one in answers):
                figures = self._server.figures()[engine]
                most = max(most, figures.get("kvc_trt_running", 0.0) + figures.get("kvc_trt_joining", 0.0))
                time.sleep(0.02)
        return int(most)
