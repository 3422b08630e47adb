"""The work of a scheduler's thread: it takes turns, reads slices of prompts, runs steps, and ends requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

from kvc_trt.errors import Cancelled, DeadlineMissed, KvcError, RequestFailed, describe
from kvc_trt.runtime.request import Event
from kvc_trt.runtime.scheduler.admission import MemoryPlan, Queue
from kvc_trt.runtime.scheduler.metrics import Metrics
from kvc_trt.runtime.scheduler.parked_rows import ParkedRows
from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.runtime.session.row_failures import Failures
from kvc_trt.runtime.session.session import Session


@dataclass
class Waiting:
    """The state that callers share with the scheduler's thread."""

    queue: Queue
    parked: ParkedRows
    closed: bool = False
    """True once new requests are refused."""
    abandoned: bool = False
    """True once accepted requests are cancelled."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """The lock of this state, notified of every change."""


@dataclass(frozen=True)
class Reading:
    """The request whose prompt is being read."""

    ticket: Ticket
    slices: Generator[float, None, int]
    """The prefill, as returned by `Session.add_in_slices`."""


class SchedulerWorker:
    """Answers waiting requests with the rows of a session. To be used by one thread.

    An error of one request ends that request. An error of the executor ends the rows that it affects: those of the
    step, or all rows if it failed to move one.
    """

    def __init__(
        self,
        session: Session,
        waiting: Waiting,
        metrics: Metrics,
        *,
        slice_seconds: float,
        max_rows: int,
        memory: MemoryPlan | None,
        clock: Callable[[], float],
    ) -> None:
        self._session, self._waiting, self._metrics = session, waiting, metrics
        self._slice_seconds, self._max_rows = slice_seconds, max_rows
        self._memory, self._clock = memory, clock
        self.joining: Reading | None = None
        self.running: dict[int, Ticket] = {}
        """The ticket of each active row, by the row's number in the session."""

    @property
    def has_work(self) -> bool:
        """True if a prompt or turn is to be read, a row to be fed, or a request to be ended."""
        return bool(self._waiting.queue or self.joining or self.running or self._waiting.parked.has_work)

    def give_up(self) -> list[Ticket]:
        """Drop all requests that have not ended, and return their tickets."""
        lost = [*self._waiting.queue, *self.running.values(), *self._waiting.parked.turns]
        if self.joining is not None:
            lost.append(self.joining.ticket)
        self._waiting.queue.clear()
        self._waiting.parked.clear()
        self.running.clear()
        self.joining = None
        return lost

    def advance(self) -> bool:
        """Read one turn or one slice, if there is one, and run one step, if rows run; False if there was nothing."""
        self._end_late()
        read = self._take_turn() or self._run_slice()
        self._end_late()
        return self._run_step() or read

    def close(self) -> None:
        """Remove the rows that are kept for a turn from the session."""
        with self._waiting.changed:
            gone = self._waiting.parked.clear()
        for one in gone:
            self._free(one.row)

    def start_again(self, error: BaseException) -> None:
        """End all accepted requests with `error`, and drop all rows of the session."""
        with self._waiting.changed:
            lost = self.give_up()
        self._session.forget_rows()
        for ticket in lost:
            self._fail(ticket, error)

    def _end_late(self) -> None:
        """End the requests that were cancelled or missed their deadline, and free their rows."""
        now = self._clock()
        with self._waiting.changed:
            late = [ticket for ticket in self._waiting.queue if self._has_to_end(ticket, now)]
            for ticket in late:
                self._waiting.queue.remove(ticket)
        if self.joining is not None and self._has_to_end(self.joining.ticket, now):
            late.append(self.joining.ticket)
            self._stop_reading()
        late += [self._leave(row) for row, one in tuple(self.running.items()) if self._has_to_end(one, now)]
        late += self._end_stays(now)
        for ticket in late:
            if ticket.cancelled or self._waiting.abandoned:
                self.end(ticket, Cancelled("the request was cancelled"), "cancelled")
            else:
                self.end(ticket, DeadlineMissed("the deadline came before the answer was whole"), "deadline")

    def _has_to_end(self, ticket: Ticket, now: float) -> bool:
        return ticket.cancelled or self._waiting.abandoned or (ticket.deadline is not None and now >= ticket.deadline)

    def _end_stays(self, now: float) -> list[Ticket]:
        """Remove kept rows that must leave; return the tickets of the turns that waited for them."""
        with self._waiting.changed:
            gone = self._waiting.parked.leaving(lambda ticket: self._has_to_end(ticket, now), now, self._waiting.closed)
        for one in gone:
            self._free(one.row)
        return [one.turn for one in gone if one.turn is not None]

    def _take_turn(self) -> bool:
        """Take the first waiting turn that fits; return whether there was one."""
        with self._waiting.changed:
            found = self._waiting.parked.next(self._turn_fits)
        if found is None:
            return False
        row, ticket = found.row, found.turn
        assert ticket is not None
        started, rows_wait = self._clock(), bool(self.running)
        self._metrics.seconds_waiting.observe(started - ticket.arrived)
        try:
            self._session.turn(row, ticket.request.prompt_token_ids, ticket.request.max_new_tokens)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._session.holds(row):  # the turn was refused, and the row is unchanged
                with self._waiting.changed:
                    self._waiting.parked.add(row, found.last, self._clock())
            self._fail(ticket, error)
            self._end_lost(error)
        else:
            self.running[row] = ticket
            self._metrics.prompt_tokens += ticket.prompt_tokens
        self._metrics.turns += 1
        if rows_wait:
            self._metrics.stall_seconds.observe(self._clock() - started)
        return True

    def _turn_fits(self, ticket: Ticket) -> bool:
        """Return whether a turn fits beside the present rows and the prompt that is being read."""
        if self._memory is None:
            return True
        others, reading = len(self.running) + len(self._waiting.parked) - 1, 0.0
        if self.joining is not None:
            others, reading = others + 1, self._memory.prefill_bytes(self.joining.ticket.prompt_tokens)
        return self._memory.needed(ticket.prompt_tokens, others) + reading <= self._memory.limit

    def _run_slice(self) -> bool:
        if self.joining is None:
            self.joining = self._next()
        if self.joining is None:
            return False
        joining, started, rows_wait = self.joining, self._clock(), bool(self.running)
        try:
            next(joining.slices)
        except StopIteration as finished:
            self.joining = None
            self._join(joining.ticket, finished.value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any failure here belongs to this request
            self.joining = None
            self._fail(joining.ticket, error)
            self._end_lost(error)
        self._metrics.slices += 1
        if rows_wait:
            self._metrics.stall_seconds.observe(self._clock() - started)
        return True

    def _next(self) -> Reading | None:
        """Take the first request out of the queue and begin to read it, if there is room; otherwise return None."""
        with self._waiting.changed:
            rows = len(self.running) + len(self._waiting.parked)
            if not self._waiting.queue or not self._session.free or rows >= self._max_rows:
                return None
            ticket = self._waiting.queue.first()
            if self._memory is not None and not self._memory.fits(ticket.prompt_tokens, rows):
                return None
            self._waiting.queue.remove(ticket)
        self._metrics.seconds_waiting.observe(self._clock() - ticket.arrived)
        return Reading(ticket, self._session.add_in_slices(ticket.request, self._slice_seconds))

    def _join(self, ticket: Ticket, row: int) -> None:
        self.running[row] = ticket
        reused = self._session.reused(row)
        own = ticket.request.context is not None
        self._metrics.prompt_tokens += ticket.prompt_tokens if own else ticket.prompt_tokens - reused
        if reused == 0:  # a stored context's tokens were counted when it was made
            fed, stored = self._session.stored(row)
            kept = len(stored) * fed if self._session.executor.limits.keeps_whole else sum(stored)
            self._metrics.kept_tokens += kept
            self._metrics.evicted_tokens += len(stored) * fed - kept
        if ticket.request.keep_context:
            try:
                ticket.context = self._session.take(row)
            except Exception as error:  # most likely no memory for a copy
                self._fail(self._leave(row), error)

    def _run_step(self) -> bool:
        if not self.running:
            return False
        try:
            events, failed = self._session.sample_each()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._end_lost(error)
            return True
        self._end_failed(failed)
        for event in self._cut(events):
            if event.row in self.running:  # unless the executor has failed to move it
                self._deliver(event)
        if self.running:
            try:
                failed = self._session.advance_each()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a run serves all rows, so the failure cannot be traced to one
                self._end_lost(error)
            else:
                self._metrics.steps += 1
                self._end_failed(failed)
        return True

    def _cut(self, events: list[Event]) -> list[Event]:
        """Return the events, ending the answers of finished tickets (`Ticket.finish`) with their latest event."""
        last = {event.row: place for place, event in enumerate(events)}
        for row, place in last.items():
            if events[place].output is None and self.running[row].finished:
                try:
                    events[place] = replace(events[place], output=self._session.end_answer(row))
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    self._end_lost(error)
                    break
        return events

    def _end_failed(self, failed: Failures) -> None:
        """End the requests whose own rows have failed, and which have left the session."""
        for row, error in failed.items():
            self._fail(self.running.pop(row), error)

    def _end_lost(self, error: BaseException) -> None:
        """End the requests whose rows have left the session because the executor failed."""
        lost = [self.running.pop(row) for row in tuple(self.running) if not self._session.holds(row)]
        with self._waiting.changed:
            gone = self._waiting.parked.take_out(lambda one: not self._session.holds(one.row))
        for ticket in (*lost, *(one.turn for one in gone if one.turn is not None)):
            self._fail(ticket, error)

    def _deliver(self, event: Event) -> None:
        ticket, now = self.running[event.row], self._clock()
        if event.output is not None:
            del self.running[event.row]
            with self._waiting.changed:
                self._metrics.ended[event.output.finish_reason] += 1
                if ticket.request.stay:
                    self._waiting.parked.add(event.row, ticket, now)
        self._metrics.generated_tokens += 1
        if ticket.token_times:
            self._metrics.seconds_per_token.observe(now - ticket.token_times[-1])
        else:
            self._metrics.seconds_to_first_token.observe(now - ticket.arrived)
        ticket.token_times.append(now)
        ticket.push(event)

    def _leave(self, row: int) -> Ticket:
        """Remove the active row `row`, and return its ticket, which has not ended yet."""
        ticket = self.running.pop(row)
        self._free(row)
        return ticket

    def _free(self, row: int) -> None:
        """Remove a row from the session, unless a failed run has removed it already."""
        try:
            if self._session.holds(row):
                self._session.remove(row)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._end_lost(error)

    def _stop_reading(self) -> None:
        """Abandon the prompt that is being read."""
        assert self.joining is not None
        slices, self.joining = self.joining.slices, None
        try:
            slices.close()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the caller ends its request in any case
            self._end_lost(error)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """End a request with the error if it is a KvcError, otherwise with a RequestFailed that describes it."""
        if not isinstance(error, KvcError):
            failure = RequestFailed(f"request {ticket.number} failed: {type(error).__name__}: {describe(str(error))}")
            failure.__cause__ = error
            error = failure
        self.end(ticket, error, "failed")

    def end(self, ticket: Ticket, error: KvcError, how: str) -> None:
        """End a request with an error, which its ticket raises; `how` is the key in `Metrics.ended`."""
        with self._waiting.changed:  # callers' threads end waiting requests
            self._metrics.ended[how] += 1
        ticket.fail(error)
