"""Child processes that are started again when they die, and that never outlive this one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import http.client
import signal
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, KvcError, UnsupportedEnvironment

MOST_DEATHS, WITHIN_SECONDS = 3, 60.0
"""So many in so short a time are no accident."""
LAST_SECONDS = 40.0
"""The time that a process may take to end: Dynamo gives a worker 30 seconds to finish the answers it has begun."""
CANCEL_AGAIN_SECONDS = 0.2
"""Time after which what did not end when it was cancelled is cancelled once more."""
_ASKING = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def ask_here(url: str, body: bytes | None = None, *, seconds: float) -> tuple[int, bytes]:
    """Return status and content of what a server on this machine answers; OSError where it does not.

    No proxy is asked, whatever the environment says of them.
    """
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, body, seconds) as answer:
            return int(answer.status), answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error}") from error


@contextlib.contextmanager
def asked_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` when this process is asked to end, by Ctrl-C or SIGTERM, instead of ending it."""
    loop = asyncio.get_running_loop()
    for number in _ASKING:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in _ASKING:
            loop.remove_signal_handler(number)


async def until_asked(asked: asyncio.Event, kept: Iterable[asyncio.Task[None]], meanwhile: Awaitable[None]) -> None:
    """Wait until the event is set, and raise the first error of `kept`, or of `meanwhile`, which is then given up."""
    others: list[asyncio.Future[Any]] = [asyncio.ensure_future(meanwhile), asyncio.ensure_future(asked.wait())]
    pending: set[asyncio.Future[Any]] = {*kept, *others}
    try:
        while not asked.is_set():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for future in others:
            await _give_up(future)


async def _give_up(future: asyncio.Future[Any]) -> None:
    """Cancel it until it ends.

    Once is not enough before Python 3.12: `asyncio.wait_for` drops a cancellation that comes together with its result.
    """
    while not future.done():
        future.cancel()
        await asyncio.wait([future], timeout=CANCEL_AGAIN_SECONDS)
    await asyncio.gather(future, return_exceptions=True)


class Child:
    """One child process. `say` reports each time it is started again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        say: Callable[[str], None],
    ) -> None:
        self.name, self.log = name, log
        self.is_ready = False
        """True once it has worked; until then its end is an error and not an accident."""
        self._command, self._environment, self._say = list(command), dict(environment), say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def keep(self) -> None:
        """Start it, and again whenever it dies; return once it was stopped.

        Raises the error with which it ended where it never worked, or dies too often.
        """
        deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        while not self._stopping:
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env=self._environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for this process, which ends the others in their order
                    preexec_fn=_end_with_parent,
                )
            if self._stopping:  # asked while it began: nobody else knows of it yet
                self.kill()
            code = await self._process.wait()
            if self._stopping:
                return
            deaths.append(time.monotonic())
            often = len(deaths) == MOST_DEATHS and deaths[-1] - deaths[0] < WITHIN_SECONDS
            if not self.is_ready or often:
                raise ended(self.name, code, self.log)
            self._say(f"{self.name} ended ({_how(code)}) and is started again")

    async def stop(self, seconds: float = LAST_SECONDS) -> None:
        """Ask the process to end, and kill it after this many seconds."""
        self._stopping = True
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except asyncio.TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                assert self._process is not None
                self._process.send_signal(number)


def ended(name: str, code: int, log: Path) -> KvcError:
    """Return the error of a process that has ended: its own, if it wrote one as `kvc-trt` does."""
    lines = log.read_text(errors="replace").splitlines()
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("error: "):
            after = lines[number + 1] if number + 1 < len(lines) else ""
            hint = after.removeprefix("hint: ") if after.startswith("hint: ") else None
            kind = InputError if code == InputError.exit_code else UnsupportedEnvironment
            return kind(lines[number].removeprefix("error: "), hint=hint)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
    return UnsupportedEnvironment(f"{name} ended ({_how(code)}): {last[-300:]}")


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent is gone, however that went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
