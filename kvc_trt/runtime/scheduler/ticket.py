"""One request in a scheduler, as its caller sees it: tokens as they come, the output, and a way to end it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator

from kvc_trt.runtime.context import Context
from kvc_trt.runtime.request import Event, Output, Request


class Ticket:
    """A request that was taken. Any thread, and any asyncio loop, may follow it; several may.

    for event in ticket: ...            # blocks; likewise `async for`
    output = ticket.result()            # blocks; likewise `await ticket.answer()`

    All of them raise the error with which the request ended: Cancelled, DeadlineMissed, or that of its own failure.
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
        """Whether the caller has asked for its end."""
        self.context: Context | None = None
        """What the caches hold of the prompt once it is read, if the request says `keep_context`."""
        self.last_token: float | None = None
        """When its newest token came, on the scheduler's clock."""
        self._cancel = cancel
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._done = False
        self._changed = threading.Condition()
        self._listeners: set[Callable[[], None]] = set()

    @property
    def done(self) -> bool:
        """Whether it has ended, with an output or an error."""
        return self._done

    def cancel(self) -> None:
        """End it. Its row is free after the slice or the step that runs now, also one that stays for a turn.

        Nothing happens if it has ended otherwise.
        """
        self._cancel(self)

    def __iter__(self) -> Iterator[Event]:
        """Yield its events from the first on, and wait for more until it has ended."""
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
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(changed.set)

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
        """Pass on an event; the scheduler calls this. The last one holds the output."""
        self._tell(event=event, done=event.output is not None)

    def fail(self, error: Exception) -> None:
        """End without an output; the scheduler calls this."""
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
