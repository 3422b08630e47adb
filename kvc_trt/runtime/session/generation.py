"""Answer any number of requests in an idle session: each joins as soon as a row is free."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from kvc_trt.errors import InputError
from kvc_trt.runtime.request import Event, Output, Request
from kvc_trt.runtime.session.admitted import label_of

Events = Generator[tuple[int, Event], None, None]
"""Events, each with the index of its request."""


class Answering(Protocol):
    """The part of `Session` that answers requests."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The active rows."""

    @property
    def free(self) -> int:
        """The number of rows that can still join."""

    def check(self, request: Request, what: str) -> int:
        """Return the number of the prompt's tokens; InputError, beginning with `what`, for an invalid request."""

    def check_idle(self, needed: str) -> None:
        """Raise InputError, beginning with `needed`, unless there are no rows."""

    def add(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Let rows join and return their numbers."""

    def sample(self) -> list[Event]:
        """Draw the next token of every row; rows that are done leave."""

    def advance(self) -> None:
        """Run one decode step."""

    def remove(self, row: int) -> None:
        """Remove a row before it is done."""


def stream(session: Answering, requests: Sequence[Request]) -> Events:
    """Check all requests now, and return an iterator that answers them (`Session.stream`)."""
    for i, request in enumerate(requests):
        label = label_of(i, len(requests))
        if request.stay:
            raise InputError(f"{label}: a row that stays for its next turn joins by Session.add")
        session.check(request, label)
    return _events(session, requests)


def collected(events: Events, count: int, on_token: Callable[[int, Event], None] | None) -> list[Output]:
    """Return the outputs of `count` requests in their order; `on_token` gets each event before the next step."""
    outputs: dict[int, Output] = {}
    with contextlib.closing(events):
        for index, event in events:
            if event.output is not None:
                outputs[index] = event.output
            if on_token is not None:
                on_token(index, event)
    return [outputs[i] for i in range(count)]


def _events(session: Answering, requests: Sequence[Request]) -> Events:
    session.check_idle("generate needs an idle session")
    waiting = deque(enumerate(requests))
    index_of: dict[int, int] = {}
    try:
        while waiting or session.rows:
            batch = [waiting.popleft() for _ in range(min(session.free, len(waiting)))]
            joined = session.add([request for _, request in batch])
            index_of.update(zip(joined, (index for index, _ in batch), strict=True))
            for event in session.sample():
                yield index_of[event.row], event
            if not (waiting and session.free):  # otherwise the next request joins first
                session.advance()
    finally:
        for row in session.rows:
            if row in index_of:
                session.remove(row)
