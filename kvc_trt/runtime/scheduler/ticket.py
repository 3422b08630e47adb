"""Tickets: a caller's handle of a request in a scheduler, with its tokens, its output, and a way to cancel it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary, WeakSet

from kvc_trt.runtime.context import Context
from kvc_trt.runtime.request import Event, Output, Request

if TYPE_CHECKING:
    import asyncio


class _LoopBell:
    """Sets events of one asyncio loop from other threads, and wakes the loop once for all events set meanwhile.

    Waking a loop writes to a socket, during which another thread may take the interpreter: done for each row, that
    would interrupt the scheduler many times in every step.
    """

    _bells: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopBell]] = WeakKeyDictionary()
    _making = threading.Lock()

    def __init__(self) -> None:
        self._waiting: WeakSet[asyncio.Event] = WeakSet()  # a loop that ends early leaves nothing behind
        self._rung = False
        self._lock = threading.Lock()

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _LoopBell:
        """Return the loop's own bell."""
        with cls._making:
            return cls._bells.setdefault(loop, cls())

    def ring(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Set an event of the loop soon; does nothing if the loop is closed."""
        with self._lock:
            self._waiting.add(event)
            if self._rung:
                return
            self._rung = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        with self._lock:
            waiting, self._waiting, self._rung = self._waiting, WeakSet(), False
        for event in waiting:
            event.set()


class Ticket:
    """A submitted request. Any number of threads and asyncio loops may iterate over its events or wait for its output.

    for event in ticket: ...            # blocks; likewise `async for`
    output = ticket.result()            # blocks; likewise `await ticket.answer()`

    All of them raise the error that ended the request: Cancelled, DeadlineMissed, or its own failure.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        *,
        prompt_tokens: int,
        priority: int,
        deadline: float | None,
        arrived: float,
        cancel: Callable[[Ticket], None],
    ) -> None:
        self.request, self.number, self.prompt_tokens = request, number, prompt_tokens
        self.priority, self.deadline, self.arrived = priority, deadline, arrived
        self.cancelled = False
        """True once the caller has cancelled the request."""
        self.finished = False
        """True once the caller has called `finish`."""
        self.context: Context | None = None
        """The context after the prompt was read, if the request has `keep_context`; otherwise None."""
        self.token_times: list[float] = []
        """The time of each token of the answer, on the scheduler's clock, like `arrived`, the time of the request."""
        self._cancel = cancel
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._done = False
        self._changed = threading.Condition()
        self._listeners: set[Callable[[], None]] = set()

    @property
    def done(self) -> bool:
        """True once the request has ended, with an output or an error."""
        return self._done

    def cancel(self) -> None:
        """Cancel the request. Its row is free after the current slice or step, even if it is kept for a turn.

        If the request has ended and its row has left, nothing happens.
        """
        self._cancel(self)

    def finish(self) -> None:
        """End the answer with its next token; its output then has the finish reason interrupted.

        If the request has ended already, nothing happens.
        """
        self.finished = True

    def __iter__(self) -> Iterator[Event]:
        """Yield the request's events from the first on, and wait for more until it has ended."""
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done or len(self._events) > seen)  # noqa: B023
                new, done = self._events[seen:], self._done
            yield from new
            seen += len(new)
            if done:
                return self._check()

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the output; TimeoutError after `timeout` seconds, which leaves the request running."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"request {self.number} has no output after {timeout} seconds")
        return self._output()

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        """Like iteration, without blocking the loop."""
        import asyncio  # here: commands that answer nothing start without it

        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        bell = _LoopBell.of(loop)

        def wake() -> None:
            bell.ring(loop, changed)

        with self._changed:
            self._listeners.add(wake)
        try:
            seen = 0
            while True:
                changed.clear()
                with self._changed:
                    new, done = self._events[seen:], self._done
                for event in new:
                    yield event
                seen += len(new)
                if done:
                    self._check()
                    return
                await changed.wait()
        finally:
            with self._changed:
                self._listeners.discard(wake)

    async def answer(self) -> Output:
        """Wait for the output without blocking the loop."""
        async for _ in self:
            pass
        return self._output()

    def push(self, event: Event) -> None:
        """Add an event; called by the scheduler. An event with an output ends the request."""
        self._tell(event=event, done=event.output is not None)

    def fail(self, error: Exception) -> None:
        """End the request with an error instead of an output; called by the scheduler."""
        self._tell(error=error, done=True)

    def _tell(self, *, event: Event | None = None, error: Exception | None = None, done: bool) -> None:
        with self._changed:
            if event is not None:
                self._events.append(event)
            self._error, self._done = error, done
            listeners = tuple(self._listeners)
            self._changed.notify_all()
        for wake in listeners:
            wake()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _output(self) -> Output:
        self._check()
        output = self._events[-1].output
        assert output is not None
        return output
