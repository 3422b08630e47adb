"""Many callers, one session: requests wait, join a running batch slice by slice, and end without disturbing others.

    with Scheduler(session) as scheduler:
        ticket = scheduler.submit(Request(prompt_ids), priority=1, deadline=scheduler.clock() + 30)
        for event in ticket: ...

One thread owns the session. It alternates: one slice of the prefill of the request whose turn it is, then one step of
all running rows. So a running row waits at most one slice and one step for its next token, whatever joins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from typing import Any

from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, InputError
from kvc_trt.runtime.admission import MemoryPlan, Queue
from kvc_trt.runtime.executor import SlicingExecutor
from kvc_trt.runtime.metrics import Metrics
from kvc_trt.runtime.request import Event, Request
from kvc_trt.runtime.session import Session
from kvc_trt.runtime.ticket import Ticket

PREFILL_SLICE_MS = 100.0
QUEUE_LIMIT = 64


@dataclass(frozen=True)
class _Joining:
    """The request whose prompt is being read."""

    ticket: Ticket
    slices: Generator[None, None, int]


class Scheduler:
    """Answers requests of many threads and asyncio loops with one session, which nothing else may use meanwhile.

    `prefill_slice_ms` is the longest time a slice of a prefill may take, where the executor can cut so finely;
    `queue_limit` the number of requests that may wait, `max_rows` of those that run (None: all rows of the session);
    `memory` None counts rows alone. `clock` gives the time, in seconds, in which deadlines are given.

    A request of higher priority joins before others that wait, but ends nothing that has begun. A request's failure is
    its own: the tokens of the others are those of a run without it.
    """

    def __init__(
        self,
        session: Session,
        *,
        prefill_slice_ms: float = PREFILL_SLICE_MS,
        queue_limit: int = QUEUE_LIMIT,
        max_rows: int | None = None,
        memory: MemoryPlan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not prefill_slice_ms > 0:
            raise ValueError(f"prefill_slice_ms must be over 0, found {prefill_slice_ms}")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, found {max_rows}")
        session.check_idle("a scheduler needs an idle session")
        self.session = session
        self.clock = clock
        self._slice_seconds = prefill_slice_ms / 1000
        self._max_rows = session.max_batch_size if max_rows is None else max_rows
        self._memory = memory
        self._metrics = Metrics()
        self._queue = Queue(queue_limit)
        self._joining: _Joining | None = None
        self._running: dict[int, Ticket] = {}
        """By row of the session."""
        self._next_number = 0
        self._closed = self._abandoned = False
        """Whether nothing more is taken, and whether what has been taken ends unanswered."""
        self._changed = threading.Condition()
        """Guards the queue, the number of the next request and the two above."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Load what slices need, and begin to answer in a thread of its own."""
        if self._thread is not None:
            raise ValueError("the scheduler has been started before")
        self.session.check_idle("a scheduler needs an idle session")
        if isinstance(self.session.executor, SlicingExecutor):
            self.session.executor.prepare_slices()
        self._thread = threading.Thread(target=self._serve, name="kvc-trt scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request, *, priority: int = 0, deadline: float | None = None) -> Ticket:
        """Take a request and return its ticket at once. Any thread may call this.

        `deadline` is the time on `clock` at which the answer must be whole; the request then ends with what it is at.
        Raises InputError for an invalid request, or one that does not fit even alone; DeadlineMissed for a deadline in
        the past; Busy for a full queue. Nothing of a refused request remains.
        """
        if request.stay:
            raise InputError("the request's row is to stay for a turn, and a scheduler answers single requests")
        tokens = self.session.check(request)
        if self._memory is not None:
            self._memory.check(tokens)
        now = self.clock()
        if deadline is not None and deadline <= now:
            raise DeadlineMissed(f"the deadline was {now - deadline:.3f} seconds ago; expected one in the future")
        with self._changed:
            if self._closed:
                raise Busy("the scheduler is closed")
            try:
                self._queue.check_room()
            except Busy:
                self._metrics.refused += 1
                raise
            ticket = Ticket(
                request,
                self._next_number,
                prompt_tokens=tokens,
                priority=priority,
                deadline=deadline,
                arrived=now,
                cancel=self._cancel,
            )
            self._next_number += 1
            self._queue.add(ticket)
            self._metrics.submitted += 1
            self._changed.notify()
        return ticket

    async def stream(
        self, request: Request, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Submit a request and yield its events; leaving the loop early, or closing it, ends the request."""
        ticket = self.submit(request, priority=priority, deadline=deadline)
        try:
            async for event in ticket:
                yield event
        finally:
            ticket.cancel()

    def metrics(self) -> dict[str, Any]:
        """Return the figures since the start as plain values, with how many requests wait, join and run now."""
        now = {"waiting": len(self._queue), "joining": int(self._joining is not None), "running": len(self._running)}
        return now | self._metrics.as_dict()

    def close(self, *, drain: bool = False) -> None:
        """Take no more requests and end: those that are there are cancelled, or with `drain` answered first."""
        with self._changed:
            self._closed = True
            self._abandoned |= not drain
            self._changed.notify()
        if self._thread is None:
            while self.turn():
                pass
        else:
            self._thread.join()

    def __enter__(self) -> Scheduler:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(drain=raised == (None, None, None))

    def turn(self) -> bool:
        """Run one slice, if a prompt can be read, and one step, if rows run; False if there was nothing to do.

        The scheduler's thread calls this. Without a thread the owner of the session may, from one thread.
        """
        self._end_late()
        sliced = self._run_slice()
        self._end_late()
        return self._run_step() or sliced

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._has_work())
                    if not self._has_work():
                        return
                self.turn()
        except Exception as error:  # nothing that a request does ends here; but nobody may wait for ever
            with self._changed:
                self._closed = True
                lost = [*self._queue, *self._running.values()]
                if self._joining is not None:
                    lost.append(self._joining.ticket)
                self._queue.clear()
                self._running.clear()
                self._joining = None
            for ticket in lost:
                self._end(ticket, error, "failed")
            raise

    def _has_work(self) -> bool:
        return bool(self._queue or self._joining or self._running)

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            ticket.cancelled = True
            waiting = ticket in self._queue
            if waiting:
                self._queue.remove(ticket)
        if waiting:  # the others leave between a slice and a step
            self._end(ticket, Cancelled("the request was cancelled while it waited"), "cancelled")

    def _end_late(self) -> None:
        """End the requests that were cancelled or whose time is over, and give their rows back."""
        now = self.clock()
        with self._changed:
            late = [ticket for ticket in self._queue if self._has_to_end(ticket, now)]
            for ticket in late:
                self._queue.remove(ticket)
        if self._joining is not None and self._has_to_end(self._joining.ticket, now):
            late.append(self._joining.ticket)
            self._joining.slices.close()
            self._joining = None
        late += [self._leave(row) for row, one in tuple(self._running.items()) if self._has_to_end(one, now)]
        for ticket in late:
            if ticket.cancelled or self._abandoned:
                self._end(ticket, Cancelled("the request was cancelled"), "cancelled")
            else:
                self._end(ticket, DeadlineMissed("the deadline came before the answer was whole"), "deadline")

    def _has_to_end(self, ticket: Ticket, now: float) -> bool:
        return ticket.cancelled or self._abandoned or (ticket.deadline is not None and now >= ticket.deadline)

    def _run_slice(self) -> bool:
        if self._joining is None:
            self._joining = self._next()
        if self._joining is None:
            return False
        joining, started, rows_wait = self._joining, self.clock(), bool(self._running)
        try:
            next(joining.slices)
        except StopIteration as finished:
            self._joining = None
            self._join(joining.ticket, finished.value)
        except Exception as error:  # whatever it is, it is this request's
            self._joining = None
            self._end(joining.ticket, error, "failed")
        self._metrics.slices += 1
        if rows_wait:
            self._metrics.stall_seconds.observe(self.clock() - started)
        return True

    def _next(self) -> _Joining | None:
        """Take the request whose turn it is out of the queue, if there is room for it."""
        with self._changed:
            if not self._queue or not self.session.free or len(self._running) >= self._max_rows:
                return None
            ticket = self._queue.first()
            if self._memory is not None and not self._memory.fits(ticket.prompt_tokens, len(self._running)):
                return None
            self._queue.remove(ticket)
        self._metrics.seconds_waiting.observe(self.clock() - ticket.arrived)
        return _Joining(ticket, self.session.add_in_slices(ticket.request, self._slice_seconds))

    def _join(self, ticket: Ticket, row: int) -> None:
        self._running[row] = ticket
        reused = self.session.reused(row)
        own = ticket.request.context is not None
        self._metrics.prompt_tokens += ticket.prompt_tokens if own else ticket.prompt_tokens - reused
        if reused == 0:  # what a stored context keeps was counted when it was made
            fed, stored = self.session.stored(row)
            kept = len(stored) * fed if self.session.executor.limits.keeps_whole else sum(stored)
            self._metrics.kept_tokens += kept
            self._metrics.evicted_tokens += len(stored) * fed - kept

    def _run_step(self) -> bool:
        if not self._running:
            return False
        for row, error in self.session.failed.items():
            ticket = self._leave(row)
            self._end(ticket, error, "failed")
        for event in self.session.sample():
            self._deliver(event)
        if self._running:
            try:
                self.session.advance()
                self._metrics.steps += 1
            except Exception as error:  # a run is of all rows: it cannot be told whose it is
                for row in tuple(self._running):
                    self._end(self._leave(row), error, "failed")
        return True

    def _deliver(self, event: Event) -> None:
        ticket, now = self._running[event.row], self.clock()
        if event.output is not None:
            del self._running[event.row]
            with self._changed:
                self._metrics.ended[event.output.finish_reason] += 1
        self._metrics.generated_tokens += 1
        if ticket.last_token is None:
            self._metrics.seconds_to_first_token.observe(now - ticket.arrived)
        else:
            self._metrics.seconds_per_token.observe(now - ticket.last_token)
        ticket.last_token = now
        ticket.push(event)

    def _leave(self, row: int) -> Ticket:
        """Take a row out of the session."""
        if self.session.holds(row):  # a run that failed has taken it out
            self.session.remove(row)
        return self._running.pop(row)

    def _end(self, ticket: Ticket, error: Exception, how: str) -> None:
        with self._changed:  # callers' threads end what waits
            self._metrics.ended[how] += 1
        ticket.fail(error)
