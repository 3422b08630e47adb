"""Share one session among many callers: requests queue, join a batch slice by slice, and end without disturbing others.

    with Scheduler(session) as scheduler:
        ticket = scheduler.submit(Request(prompt_ids), priority=1, deadline=scheduler.clock() + 30)
        for event in ticket: ...

One thread owns the session. It alternates between one slice of the next request's prefill and one step of all
running rows. So a running row waits at most one slice and one step for its next token, however many requests join.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from typing import Any

from kvc_trt.errors import Busy, Cancelled, DeadlineMissed
from kvc_trt.runtime.executor import SlicingExecutor
from kvc_trt.runtime.kinds import Kind
from kvc_trt.runtime.request import Event, Request, check_token_ids
from kvc_trt.runtime.scheduler.admission import MemoryPlan, Queue
from kvc_trt.runtime.scheduler.metrics import Metrics
from kvc_trt.runtime.scheduler.parked_rows import ParkedRows
from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.runtime.scheduler.worker import SchedulerWorker, Waiting
from kvc_trt.runtime.session.admitted import Admitted
from kvc_trt.runtime.session.session import Session

LOG = logging.getLogger("kvc_trt.scheduler")
PREFILL_SLICE_MS = 100.0
QUEUE_LIMIT = 64
STAY_SECONDS = 600.0
_POLL_SECONDS = 0.05
"""The interval between checks while every queued request waits for a kept row to leave."""


class Scheduler:
    """Answers requests of many threads and asyncio loops with one session, which nothing else may use meanwhile.

    `prefill_slice_ms` is the longest time that a slice of a prefill may take, if the executor can cut so finely.
    `queue_limit` is the number of requests that may wait, `max_rows` the number that may run (None: all rows of the
    session). Turns of conversations do not count as waiting: each has a row already, so there are at most `max_rows` of
    them. `memory`, if given, also limits the requests that run. Deadlines are times on `clock`, in seconds.

    The row of a request with `stay` is kept after its answer, for the next turn of a conversation (`ask`). It counts
    like a running row, and leaves when its ticket is cancelled, or after `stay_seconds` without a turn. Without
    `conversations`, the graph of turns is loaded by the first turn, while all other requests wait.

    A request of higher priority joins before other waiting ones, but ends none that has begun. A request that fails
    does not affect others: their tokens are the same as without it.
    """

    def __init__(
        self,
        session: Session,
        *,
        prefill_slice_ms: float = PREFILL_SLICE_MS,
        queue_limit: int = QUEUE_LIMIT,
        max_rows: int | None = None,
        stay_seconds: float = STAY_SECONDS,
        conversations: bool = True,
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
        self._memory = memory
        self._metrics = Metrics()
        self._waiting = Waiting(Queue(queue_limit), ParkedRows(stay_seconds))
        self._worker = SchedulerWorker(
            session,
            self._waiting,
            self._metrics,
            slice_seconds=prefill_slice_ms / 1000,
            max_rows=session.max_batch_size if max_rows is None else max_rows,
            memory=memory,
            clock=clock,
        )
        self.most_requests = (session.max_batch_size if max_rows is None else max_rows) + queue_limit
        """The number of requests that may run and wait at once."""
        self._conversations = conversations
        self._next_number = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Load the parts of the engine that slices and turns need, and start the thread that answers."""
        if self._thread is not None:
            raise ValueError("the scheduler has been started before")
        self.session.check_idle("a scheduler needs an idle session")
        if isinstance(self.session.executor, SlicingExecutor):
            self.session.executor.prepare_slices()
        if self._conversations:
            self.session.load_turns()
        self._thread = threading.Thread(target=self._serve, name="kvc-trt scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request, *, priority: int = 0, deadline: float | None = None) -> Ticket:
        """Queue a request and return its ticket at once. Any thread may call this.

        `deadline` is the time on `clock` by which the answer must be complete; a request that misses it ends. Raises
        InputError for an invalid request, or one that does not fit even alone; DeadlineMissed for a deadline in the
        past; Busy for a full queue or a closed scheduler. A refused request changes nothing.
        """
        tokens = self.session.check(request)
        priority, deadline = _order(priority, deadline)
        now = self._check(tokens, deadline)
        with self._waiting.changed:
            self._check_open()
            try:
                self._waiting.queue.check_room()
            except Busy:
                self._metrics.refused += 1
                raise
            ticket = self._ticket(request, tokens, priority, deadline, now)
            self._waiting.queue.add(ticket)
        return ticket

    def ask(
        self,
        last: Ticket,
        token_ids: Iterable[int],
        *,
        max_new_tokens: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Ticket:
        """Queue the next turn of a conversation, after the answer of ticket `last`; return the turn's own ticket.

        The tokens are read at once, as by `Session.turn`, before the next slice of any prompt; without `max_new_tokens`
        the previous limit applies. If a turn does not fit, only the turn fails, and another one may follow `last`. If a
        turn is cancelled, misses its deadline or fails otherwise, the conversation ends and its row is free. Raises
        InputError for invalid values, for a turn that does not fit even alone, and if no turn can follow `last`;
        DeadlineMissed as `submit` does; Busy for a closed scheduler.
        """
        limits = self.session.executor.limits
        priority, deadline = _order(priority, deadline)
        with self._waiting.changed:
            self._check_open()
            self._waiting.parked.check(last)
        request = replace(
            last.request,
            prompt_token_ids=check_token_ids(token_ids, limits, "the turn"),
            max_new_tokens=last.request.max_new_tokens if max_new_tokens is None else max_new_tokens,
            context=None,
            continuation_token_ids=(),
        )
        tokens = len(Admitted.of(request, limits, "the turn").prompt)
        now = self._check(tokens, deadline)
        with self._waiting.changed:
            self._check_open()
            self._waiting.parked.check(last)
            ticket = self._ticket(request, tokens, priority, deadline, now)
            self._waiting.parked.ask(last, ticket)
        return ticket

    def _check_open(self) -> None:
        if self._waiting.closed:
            raise Busy("the scheduler is closed")

    def _check(self, tokens: int, deadline: float | None) -> float:
        """Return the current time; InputError if a prompt does not fit even alone, DeadlineMissed if it is too late."""
        if self._memory is not None:
            self._memory.check(tokens)
        now = self.clock()
        if deadline is not None and deadline <= now:
            raise DeadlineMissed(f"the deadline was {now - deadline:.3f} seconds ago; expected one in the future")
        return now

    def _ticket(self, request: Request, tokens: int, priority: int, deadline: float | None, now: float) -> Ticket:
        """Return a new ticket, and wake the scheduler's thread."""
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
        self._metrics.submitted += 1
        self._waiting.changed.notify()
        return ticket

    async def stream(
        self, request: Request, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Submit a request and yield its events; leaving the loop early, or closing the generator, cancels it."""
        ticket = self.submit(request, priority=priority, deadline=deadline)
        try:
            async for event in ticket:
                yield event
        finally:
            ticket.cancel()

    def metrics(self) -> dict[str, Any]:
        """Return the figures since the start as plain values, and the numbers of requests that wait, join and run."""
        now = {
            "waiting": len(self._waiting.queue) + len(self._waiting.parked.turns),
            "joining": int(self._worker.joining is not None),
            "running": len(self._worker.running),
            "staying": len(self._waiting.parked),
        }
        return now | self._metrics.as_dict()

    def close(self, *, drain: bool = False) -> None:
        """Refuse new requests and stop; pending ones are cancelled, or with `drain` answered first."""
        with self._waiting.changed:
            self._waiting.closed = True
            self._waiting.abandoned |= not drain
            self._waiting.changed.notify()
        if self._thread is None:
            while self.advance():
                pass
        else:
            self._thread.join()
        self._worker.close()

    def __enter__(self) -> Scheduler:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(drain=raised == (None, None, None))

    def advance(self) -> bool:
        """Read one turn or one slice, if there is one, and run one step, if rows run; False if there was nothing to do.

        The scheduler's thread calls this. If `start` was not called, the caller may do so instead, from one thread.
        """
        return self._worker.advance()

    def _serve(self) -> None:
        while True:
            with self._waiting.changed:
                self._waiting.changed.wait_for(lambda: self._waiting.closed or self._worker.has_work)
                if not self._worker.has_work:
                    return
            try:
                advanced = self.advance()
            except BaseException as error:
                # A bug in the scheduler: end all accepted requests, so that no caller waits for ever, and start afresh.
                LOG.exception("the scheduler failed, and all accepted requests with it")
                self._worker.start_again(error)
                continue
            if not advanced:
                with self._waiting.changed:
                    self._waiting.changed.wait(_POLL_SECONDS)

    def _cancel(self, ticket: Ticket) -> None:
        with self._waiting.changed:
            ticket.cancelled = True
            self._waiting.changed.notify()
            waiting = ticket in self._waiting.queue
            if waiting:
                self._waiting.queue.remove(ticket)
        if waiting:  # running requests leave between a slice and a step
            self._worker.end(ticket, Cancelled("the request was cancelled while it waited"), "cancelled")


def _order(priority: int, deadline: float | None) -> tuple[int, float | None]:
    """Return a request's priority and deadline as plain numbers; InputError for other values."""
    when = None if deadline is None else Kind.NUMBER.plain(deadline, "deadline")
    return Kind.INTEGER.plain(priority, "priority"), when
