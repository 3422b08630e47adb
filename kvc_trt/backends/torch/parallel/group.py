"""The ranks of one engine, as its caller asks them: each call runs on all of them, and fails for all of them."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from kvc_trt.backends.torch.device import choose_device
from kvc_trt.backends.torch.parallel.messages import Done, Failed, RankCall, Start
from kvc_trt.backends.torch.parallel.processes import SECONDS_TO_DIE, RankProcesses
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.held import HeldFile
from kvc_trt.kernels.loading import current_library
from kvc_trt.machine import usable_cores
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sharding import Shard, shards

EXCHANGE_SECONDS = 600.0
"""A rank that waits longer for the others in one sum gives up. A rank that died is noticed at once."""
GRACE_SECONDS = 2.0
"""How long the other ranks may take to end a call that has failed on one of them."""
AGAIN = "run the command again; where memory is short, dmesg names the process that the system has ended"


class RankError(RuntimeError):
    """A bug that showed in a rank; its cause holds the rank's traceback."""


class RankGroup:
    """The ranks of an engine's weights; they start at the first call. Several executors can share them.

    If a rank dies, or fails where the others cannot follow, all of them are ended, and every later call raises the
    same error. Not thread-safe.
    """

    def __init__(
        self, model: ModelConfig, weight_file: HeldFile, ranks: int, *, device: str = "auto", threads: int | None = None
    ) -> None:
        self.shards: tuple[Shard, ...] = shards(model, ranks)
        self._model, self._weight_file = model, weight_file
        self.device = device_of(device, ranks)
        """ "cuda" or "cpu"."""
        self._threads = threads or max(1, usable_cores() // ranks)
        self._numbers, self._released = count(), list[int]()
        self._processes: RankProcesses | None = None
        self._ended: BaseException | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.shards)

    def number(self, owner: object) -> int:
        """Return a new number for something that the ranks keep as long as `owner` lives."""
        number = next(self._numbers)
        weakref.finalize(owner, self._released.append, number).atexit = False
        return number

    def call(self, executor: int, method: str, *arguments: Any) -> Any:
        """Run a method of an executor on all ranks and return rank 0's result."""
        return self._run(executor, method, [arguments] * self.ranks, {0})[0]

    def call_all(self, executor: int, method: str, *arguments: Any) -> list[Any]:
        """Run a method of an executor on all ranks and return the result of each."""
        return self._run(executor, method, [arguments] * self.ranks, set(range(self.ranks)))

    def call_each(self, executor: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Run a method of an executor on all ranks, each with its own arguments."""
        self._run(executor, method, arguments, set())

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks, in their order; empty before the first call."""
        return [] if self._processes is None else self._processes.ids

    def end(self) -> None:
        """End all ranks; the group cannot be used again."""
        self._ended = self._ended or ValueError("the ranks have been ended")
        if self._processes is not None:
            self._processes.end()

    def _run(self, executor: int, method: str, arguments: Sequence[tuple[Any, ...]], wanted: set[int]) -> list[Any]:
        if self._ended is not None:
            raise self._ended
        if self._processes is None:
            self._start()
        released, self._released[:] = tuple(self._released), []
        return self._exchange(
            [RankCall(executor, method, given, rank in wanted, released) for rank, given in enumerate(arguments)]
        )

    def _start(self) -> None:
        """Start the ranks and let them meet."""
        weights = self._weight_file.lend()
        self._processes = RankProcesses(self.ranks, self._threads, weights.descriptor)
        weakref.finalize(self, self._processes.end)
        store = str(self._processes.directory / "store")
        common = self.ranks, self._model, weights, self.device, store, EXCHANGE_SECONDS, self._threads
        self._exchange([Start(rank, *common) for rank in range(self.ranks)])

    def _exchange(self, messages: Sequence[Start | RankCall]) -> list[Any]:
        """Send each rank its message and return the results. Any exception here ends the ranks."""
        assert self._processes is not None
        try:
            replies = self._replies(self._processes.commands, messages)
            failures = {rank: reply for rank, reply in enumerate(replies) if not isinstance(reply, Done)}
            if not failures:
                return [self._result(reply) for reply in replies if isinstance(reply, Done)]
            error = self._error(self._processes, failures)
        except BaseException:
            self.end()
            raise
        if not all(isinstance(reply, Failed) and reply.intact for reply in replies):
            self._ended = error
            self.end()
        raise error

    def _replies(
        self, commands: Sequence[Connection], messages: Sequence[Start | RankCall]
    ) -> list[Done | Failed | None]:
        """Return each rank's reply; None for one that has died, or waits for one that has failed."""
        replies: list[Done | Failed | None] = [None] * self.ranks
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(commands)}
        for connection, message in zip(commands, messages, strict=True):
            if not _sent(connection, message):
                return replies
        deadline = None
        while waiting:
            ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for answered in ready:
                rank = waiting.pop(answered)
                replies[rank] = _received(commands[rank])
                if replies[rank] is None:
                    return replies
                if isinstance(replies[rank], Failed) and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
        return replies

    def _error(self, processes: RankProcesses, failures: Mapping[int, Failed | None]) -> BaseException:
        """Return the exception to raise: a user's error first, then a rank's death, then a bug, which a death may have
        caused."""
        said = {rank: reply for rank, reply in failures.items() if isinstance(reply, Failed)}
        for failed in said.values():
            error = failed.error()
            if error is not None:
                return error
        death = processes.death(GRACE_SECONDS if said else 2 * SECONDS_TO_DIE)
        if death is not None or not said:
            return UnsupportedEnvironment(f"{death or 'a rank died'}; the others were ended", hint=AGAIN)
        rank, failed = next(iter(said.items()))
        bug = RankError(f"rank {rank} of {self.ranks}: {failed.message}")
        bug.__cause__ = RuntimeError(failed.traceback)
        return bug

    def _result(self, reply: Done) -> Any:
        for level, logger, line in reply.log:
            logging.getLogger(logger).log(level, "%s", line)
        return reply.result


def device_of(name: str, ranks: int) -> str:
    """Return where ranks run, cuda or cpu, as `choose_device` says; UnsupportedEnvironment for too few GPUs."""
    library = None if name == "cpu" else current_library()
    if library is None or library.device_type == "cpu":
        return choose_device(name).type
    found = torch.cuda.device_count()
    if found < ranks:
        raise UnsupportedEnvironment(
            f"--tp {ranks} needs {ranks} GPUs, one per rank; this machine has {found}",
            hint="build it for fewer (--tp), or on a machine without them with --no-verify",
        )
    return "cuda"


def _sent(connection: Connection, message: Start | RankCall) -> bool:
    try:
        connection.send(message)
    except OSError:
        return False
    return True


def _received(connection: Connection) -> Done | Failed | None:
    try:
        reply: Done | Failed = connection.recv()
    except (EOFError, OSError):
        return None
    return reply
