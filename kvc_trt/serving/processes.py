"""Child processes that are restarted when they die, and that never outlive this process."""

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
"""A child that dies this many times within this time is not restarted any more."""
LAST_SECONDS = 40.0
"""The time that a process may take to end: Dynamo gives a worker 30 seconds to finish the answers it has begun."""
CANCEL_AGAIN_SECONDS = 0.2
"""The time after which a task that is still running is cancelled once more."""
_ASKING = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def ask_here(url: str, body: bytes | None = None, *, seconds: float) -> tuple[int, bytes]:
    """Return the status and the body of a local server's answer; OSError without one, or for an error's status.

    Proxy settings in the environment are ignored. `seconds` is the timeout.
    """
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, body, seconds) as answer:
            return int(answer.status), answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error}") from error


@contextlib.contextmanager
def asked_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` on Ctrl-C or SIGTERM, instead of ending this process."""
    loop = asyncio.get_running_loop()
    for number in _ASKING:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in _ASKING:
            loop.remove_signal_handler(number)


async def until_asked(asked: asyncio.Event, kept: Iterable[asyncio.Task[None]], meanwhile: Awaitable[None]) -> None:
    """Wait until `asked` is set, or raise the first error of `kept` or `meanwhile`; then cancel `meanwhile`."""
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
    """Cancel a future again and again until it ends.

    Once is not enough before Python 3.12: `asyncio.wait_for` drops a cancellation that comes together with its result.
    """
    while not future.done():
        future.cancel()
        await asyncio.wait([future], timeout=CANCEL_AGAIN_SECONDS)
    await asyncio.gather(future, return_exceptions=True)


class Child:
    """One child process. `say` prints a message each time it is restarted."""

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
        """True once the child has worked; a child that ends before that is not restarted."""
        self._command, self._environment, self._say = list(command), dict(environment), say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The number of the child's process; None while it does not run."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def keep(self) -> None:
        """Start the child, and restart it whenever it dies; return once `stop` or `kill` has ended it.

        Raises the error with which it ended if it has never worked, or dies too often.
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
                    start_new_session=True,  # Ctrl-C must reach this process alone, which ends its children in order
                    preexec_fn=_end_with_parent,
                )
            if self._stopping:  # stopped while the child was being started: `stop` did not see it
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
        """Ask the process to end, and kill it if it still runs after this many seconds."""
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
        """Kill the process at once."""
        self._stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                assert self._process is not None
                self._process.send_signal(number)


def ended(name: str, code: int, log: Path) -> KvcError:
    """Return the error of a process that has ended: its own from the log, if it wrote one in `kvc-trt`'s form."""
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
    """Let the kernel end this process when its parent ends for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
