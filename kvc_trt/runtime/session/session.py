"""Rows that join a running decode batch, advance together and leave when they are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.runtime.context import Context, Packing
from kvc_trt.runtime.executor import Executor
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.request import Event, Output, Request, check_token_ids
from kvc_trt.runtime.session.context_store import ContextStore
from kvc_trt.runtime.session.drafting import Drafting
from kvc_trt.runtime.session.generation import collected, stream
from kvc_trt.runtime.session.joining import Joining
from kvc_trt.runtime.session.reported_lists import ReportedLists
from kvc_trt.runtime.session.row import Row
from kvc_trt.runtime.session.row_failures import Failures, failure_of
from kvc_trt.runtime.session.row_slots import RowSlots
from kvc_trt.runtime.session.steps import Steps
from kvc_trt.runtime.session.turn import check_gives_all_logits, load_turns, take_turn, takes_turns
from kvc_trt.runtime.speculation.settings import Speculation
from kvc_trt.runtime.timings import Timings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvc_trt.models.sources.tokenizer_library import Tokenizer


class Session:
    """A decode batch over one executor.

    There is one buffer per state tensor, and the active rows are its first rows: a joining row is copied in after the
    others, and the last row moves into the place of a leaving one. Rows that wait for a turn follow behind them. `add`
    returns a row's number, which never changes. Rows do not influence each other. A run that fails or is interrupted
    may have changed some of the caches, so the rows that it ran leave the session. Not thread-safe.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        max_batch_size: int,
        *,
        end_token_ids: Iterable[int] = (),
        packing: Packing | None = None,
        prefix_bytes: int = 0,
        speculation: Speculation | None = None,
        lists: ReportedLists | None = None,
        progress: Progress | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, found {max_batch_size}")
        self.executor = executor
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self.timings = Timings()
        self.contexts = ContextStore(packing, prefix_bytes, executor.limits, turns=takes_turns(executor))
        """The contexts that rows start from and are stored as."""
        self._slots = RowSlots(executor)
        self._rows = self._slots.active
        self._joining = Joining(
            tokenizer, self._slots, self.contexts, self.timings, end_token_ids=end_token_ids, lists=lists,
            progress=progress or NullProgress(),
        )  # fmt: skip
        self._drafting = None if speculation is None else Drafting(executor, speculation, self.timings)
        self._joining.keeps_text = self._drafting is not None
        self._steps = Steps(executor, self._drafting, self.timings, lists)
        executor.allocate(max_batch_size)
        if prefix_bytes:
            self.load_turns()  # turns read the rest of a prompt that begins with a shared text

    @property
    def rows(self) -> tuple[int, ...]:
        """The active rows, in buffer order."""
        return tuple(row.identity for row in self._rows)

    @property
    def free(self) -> int:
        """The number of rows that can still join."""
        return self.max_batch_size - len(self._slots) - self._joining.in_slices

    @property
    def failed(self) -> dict[int, InputError]:
        """The error of each row that cannot draw because its logits are not finite; `sample` raises the first."""
        return {row.identity: row.not_finite() for row in self._ready() if not row.is_finite}

    def stored(self, row: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of tokens that a row has fed, and the number stored in each of its caches."""
        found = self._slots.find(row)
        return found.position, found.physical_lengths

    def reused(self, row: int) -> int:
        """Return the number of tokens in the stored context from which a row started; 0 without one."""
        return self._slots.find(row).reused

    def grow(self, max_batch_size: int) -> None:
        """Make room for more rows in an idle session."""
        self.check_idle("a session grows while it is idle")
        self.executor.allocate(max_batch_size)
        self.max_batch_size = max_batch_size

    def add(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Let rows join the batch with one batched prefill and return their numbers. Nothing is sampled yet.

        A request with a context joins with a copy of it, without a prefill, and so does a prompt that begins with a
        shared text, if the answer fits after it. Raises InputError for an invalid request and ValueError for more rows
        than are free; no row has joined then.
        """
        if not requests:
            return ()
        if len(requests) > self.free:
            raise ValueError(f"{len(requests)} rows cannot join: {self.free} of {self.max_batch_size} are free")
        return self._joining.add(requests)

    def check(self, request: Request, what: str = "prompt") -> int:
        """Return the number of the prompt's tokens; InputError, beginning with `what`, for an invalid request.

        Any thread may call this.
        """
        return len(self._joining.admit(request, what).prompt)

    def add_in_slices(self, request: Request, limit: float) -> Generator[float, None, int]:
        """Let one row join with a prefill that runs slice by slice, one per `next`; return the row's number.

        Yields the share of the prefill that is done, 0..1. A slice takes at most `limit` seconds if the executor can
        cut so finely. Other rows may step, join and leave in between. The row's place is taken from the first slice on,
        until the generator ends or is closed. Errors are those of `add`, at the first slice. A row that starts from a
        context joins in one slice.
        """
        if not self.free:
            raise ValueError(f"no row can join: all {self.max_batch_size} are taken")
        return (yield from self._joining.add_in_slices(request, limit))

    def take(self, row: int) -> Context:
        """Return a copy of everything that a row has fed so far, as a context from which other rows can start.

        The row goes on. Its queued tokens, and a sampled token that was not fed yet, are not part of the context.
        ValueError for a row whose logits stay on the device, unless its request has `keep_logits`.
        """
        found = self._settled(row)
        return self.contexts.of_row(found, self.executor.read_row(self._slots.place(found)))

    def constrain(self, row: int, grammar: Grammar | None) -> None:
        """Constrain the answers to a row's next turn and later ones by a grammar; None allows any text.

        Call it while the row waits for a turn. Raises InputError for a row that is being answered, because its answer
        has begun under another rule, and for a grammar that cannot be compiled; the row is then unchanged.
        """
        found = self._slots.find(row)
        if found in self._rows:
            raise InputError(
                f"row {row} is being answered, and a grammar is of whole answers: expected a row that waits for a turn",
                hint="constrain it once its answer has ended, or give the grammar with the request",
            )
        self._joining.constrain(found, grammar)

    def queued(self, row: int) -> int:
        """Return the number of queued tokens that a row feeds before it samples."""
        return len(self._slots.find(row).forced)

    def extend(self, row: int, token_ids: Iterable[int]) -> None:
        """Queue tokens that are fed to one row through decode (a question that arrives after compaction).

        They follow everything the row has seen. Each `step` feeds one of them while the other rows go on. Once the
        queue is empty, the row samples from the logits after the last of them. InputError if they do not fit.
        """
        found = self._slots.find(row)
        if found not in self._rows:
            raise ValueError(f"row {row} waits for a turn; active rows: {self.rows}")
        found.check_no_proof()
        checked = check_token_ids(token_ids, self.executor.limits, found.label)
        unfed = len(found.forced) + (found.next_token is not None)
        found.check_room(unfed + len(checked), found.label)
        found.forced.extend(checked)

    def turn(
        self, row: int, token_ids: Iterable[int], max_new_tokens: int | None = None, *, feed_last: bool = True
    ) -> None:
        """Let one row take a turn of a conversation, in one pass; the next `step` samples the answer to it.

        The tokens follow everything that the row has seen, and its policy compacts stored and new tokens by its own
        rule. A new answer begins, of at most `max_new_tokens` (None: as before). The token that was sampled last has
        not been fed and goes first; without `feed_last` it is left out, for tokens that repeat it or end the answer in
        another way. InputError if the engine takes no turns, or if this one does not fit; the row is then unchanged.
        """
        self._take_turn(row, token_ids, max_new_tokens, feed_last=feed_last)

    def turn_logits(
        self, row: int, token_ids: Iterable[int], max_new_tokens: int | None = None, *, feed_last: bool = True
    ) -> NDArray[np.float32]:
        """Take a turn as `turn` does, and return the logits [tokens, vocab] after each of `token_ids`.

        Raises the InputErrors of `turn`, and one for an engine that was built without `all_logits`.
        """
        check_gives_all_logits(self.executor, f"row {row}")
        logits = self._take_turn(row, token_ids, max_new_tokens, feed_last=feed_last)
        assert logits is not None, "its limits promise them"
        return logits

    def _take_turn(
        self, row: int, token_ids: Iterable[int], max_new_tokens: int | None, *, feed_last: bool
    ) -> NDArray[np.float32] | None:
        """Take a turn; return the logits [tokens, vocab] after each of `token_ids`, None if the engine lacks them."""
        found = self._settled(row)
        start = time.perf_counter()
        try:
            taken = take_turn(
                self.executor, found, self._slots.place(found), token_ids, max_new_tokens, feed_last=feed_last
            )
        except InputError:
            raise
        except BaseException:
            self._slots.leave(found)
            raise
        if found not in self._rows:
            self._slots.resume(found)
        self.timings.turn_tokens += taken.tokens
        self.timings.turn_seconds += time.perf_counter() - start
        return taken.logits

    def load_turns(self) -> None:
        """Load the parts of the engine that turns need, if it takes any, so that the first turn does not wait."""
        load_turns(self.executor)

    def forget_rows(self) -> None:
        """Drop all rows without touching the executor, whose state is unknown after a failure."""
        self._slots.forget()

    def end_answer(self, row: int) -> Output:
        """End a row's answer with the token that it has drawn last. The row then leaves, or waits for a turn.

        Call it between `sample` and `advance`. ValueError for a row that has not drawn a token since the last step.
        """
        found = self._slots.find(row)
        if found not in self._rows or found.next_token is None:
            raise ValueError(f"row {row} has no answer to end: it must have drawn a token that was not fed")
        output = found.interrupted()
        if found.stays:
            self._slots.wait(self._settled(row))
        else:
            self._slots.leave(found)
        return output

    def holds(self, row: int) -> bool:
        """Return whether a row is in the session, active or waiting."""
        return self._slots.holds(row)

    def remove(self, row: int) -> None:
        """Remove a row before it is done, or while it waits for a turn."""
        self._slots.leave(self._slots.find(row))

    def step(self) -> list[Event]:
        """Sample a token for every row with an empty queue, then run one decode step for the rows that are not done.

        `sample` and `advance` are the two halves; call them yourself to show the events before waiting for the step.
        """
        events = self.sample()
        self.advance()
        return events

    def sample(self) -> list[Event]:
        """Draw the next token of every row that has nothing to feed; rows that are done leave.

        In a session with drafts, a row may draw several tokens, which the latest pass has checked, with one event each.
        """
        for error in self.failed.values():
            raise error
        events, failed = self.sample_each()
        for failure in failed.values():
            raise failure
        return events

    def sample_each(self) -> tuple[list[Event], Failures]:
        """Like `sample`, but isolate failures of single rows: return the events, and the errors by row.

        A row that failed leaves, and the others are as if it had left before.
        """
        ready, count = self._ready(), len(self._rows)
        failed: Failures = {}
        drawn: dict[Row, list[Event]] = {}
        for row in ready:
            with failure_of(row, failed):
                drawn[row] = self._draw(row, count)
        for row in ready:
            if row.identity in failed:
                self._slots.leave(row)
            elif drawn[row][-1].output is not None:
                if row.stays:
                    self._slots.wait(self._settled(row.identity))
                else:
                    self._slots.leave(row)
        return [event for row, events in drawn.items() for event in events], failed

    def _draw(self, row: Row, rows: int) -> list[Event]:
        """Draw the next token of one of `rows` rows, and further ones that a pass has stored; return their events."""
        if not row.is_finite:
            raise row.not_finite()
        events = [row.sample()]
        if self._drafting is not None and events[0].output is None:
            events += self._drafting.follow(row, rows)
        return events

    def advance(self) -> None:
        """Run one decode step: feed every active row its queued or sampled token. Call `sample` first.

        In a session with drafts, the run may check drafts of all rows instead.
        """
        for failure in self.advance_each().values():
            raise failure

    def advance_each(self) -> Failures:
        """Like `advance`, but return the errors of single rows that failed to record the run's output; these have left.

        An error of the executor is raised, after all rows that it ran have left; waiting rows stay.
        """
        if not self._rows:
            return {}
        try:
            failed = self._steps.run(self._rows)
        except BaseException:
            self._slots.leave_all(self._rows)
            raise
        self._slots.leave_all([row for row in self._rows if row.identity in failed])
        return failed

    def generate(
        self, requests: Sequence[Request], on_token: Callable[[int, Event], None] | None = None
    ) -> list[Output]:
        """Answer all requests, as many at a time as fit in the batch, and return the outputs in the same order.

        `on_token(index of the request, event)` is called for each token before the next decode step. Raises InputError
        for an invalid request, and for one that stays, before anything runs. The session must be idle, and is idle
        again afterwards.
        """
        return collected(self.stream(requests), len(requests), on_token)

    def stream(self, requests: Sequence[Request]) -> Generator[tuple[int, Event], None, None]:
        """Yield (index of the request, event) token by token; otherwise like `generate`.

        Requests are checked at the call. Closing the iterator early ends the rows that are still active.
        """
        return stream(self, requests)

    def check_idle(self, needed: str) -> None:
        """Raise InputError, beginning with what is `needed`, unless there are no rows and none is joining."""
        if len(self._slots) or self._joining.in_slices:
            waiting = tuple(row.identity for row in self._slots.waiting)
            raise InputError(
                f"{needed}, found rows {self.rows}, waiting {waiting}, joining {self._joining.in_slices}",
                hint="close the conversation, scheduler or stream that holds them, or remove(row) each",
            )

    def _ready(self) -> list[Row]:
        """Return the rows that have nothing to feed."""
        return [row for row in self._rows if not row.forced and row.next_token is None]

    def _settled(self, identity: int) -> Row:
        """Return a row after removing the tokens of a draft that it did not feed from its caches."""
        row = self._slots.find(identity)
        if self._drafting is not None:
            self._drafting.take_back(row, self._slots.place(row))
        return row
