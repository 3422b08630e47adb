"""Let requests join a session: check them, and start their rows from a prefill or from a stored context."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvc_trt.progress import Progress
from kvc_trt.proof import Recorder
from kvc_trt.runtime.executor import Prefilled, prefill_in_slices
from kvc_trt.runtime.grammar.compiler import Grammars
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.request import Request
from kvc_trt.runtime.sampling.banned import banned_sequences, check_leaves_a_token
from kvc_trt.runtime.session.admitted import Admitted, label_of
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.runtime.session.context_store import ContextStore
from kvc_trt.runtime.session.reported_lists import ReportedLists
from kvc_trt.runtime.session.request_checks import check_context_text, check_continuation, check_proof
from kvc_trt.runtime.session.row import Row
from kvc_trt.runtime.session.row_slots import RowSlots
from kvc_trt.runtime.session.turn import read_rest
from kvc_trt.runtime.speculation.ngram import NgramText
from kvc_trt.runtime.timings import Timings

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer


class Joining:
    """Makes a row with a number for each request, and puts it behind the active rows of `slots`."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        slots: RowSlots,
        contexts: ContextStore,
        timings: Timings,
        *,
        end_token_ids: Iterable[int],
        lists: ReportedLists | None,
        progress: Progress,
    ) -> None:
        self._executor = slots.executor
        self._tokenizer = tokenizer
        self._slots = slots
        self._contexts = contexts
        self._timings = timings
        self._end_token_ids = frozenset(end_token_ids)
        self._lists = lists
        self._progress = progress
        self._grammars = Grammars(tokenizer, slots.executor.limits.vocab_size)
        self._next_identity = 0
        self.keeps_text = False
        """True if rows keep the tokens that they read, for drafts."""
        self.in_slices = 0
        """The number of rows reserved by prefills in slices that have not ended."""

    def admit(self, request: Request, label: str) -> Admitted:
        """Admit a request; InputError, beginning with `label`, if it is invalid or can never fit."""
        limits = self._executor.limits
        admitted = Admitted.of(request, limits, label)
        if request.stop_strings and self._tokenizer is None:
            raise admitted.error("stop strings need a tokenizer, and this engine has none")
        if request.stay and limits.no_turns is not None:
            raise admitted.error(limits.no_turns.reason, hint=limits.no_turns.hint)
        check_proof(admitted, self._lists)
        if request.context is not None:
            self._contexts.check(request.context, f"{label}: its context")
            self._contexts.start_after(request.context, admitted)
        else:
            check_continuation(admitted, limits)
        admitted.ends = frozenset((*request.stop_token_ids, *(() if request.ignore_eos else self._end_token_ids)))
        admitted.banned = banned_sequences(request, self._tokenizer, limits, label)
        if request.grammar is not None:
            self._grammars.check(request.grammar, label)
        check_leaves_a_token(admitted.banned, admitted.ends if request.min_tokens else (), limits, label)
        check_context_text(admitted, limits)
        return admitted

    def add(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Let rows join with one batched prefill (`Session.add`); there must be places for all of them."""
        everyone = [self._start(request, label_of(i, len(requests))) for i, request in enumerate(requests)]
        fresh = [one for one in everyone if one.context is None]
        prefilled = self._prefill([one.prompt for one in fresh]) if fresh else None
        if prefilled is not None:
            for source, one in enumerate(fresh):
                one.read(prefilled, source)
                self._record_kept(one, source)
        rows = {one: self._row(one) for one in everyone}
        with self._all_or_none(rows.values()):
            if prefilled is not None:
                for source, one in enumerate(fresh):
                    self._executor.insert(prefilled, source, self._slots.join(rows[one]))
            # Contexts are written last: the executor may keep prefilled rows in free rows until they are inserted.
            for one, row in rows.items():
                if one.context is not None:
                    self._executor.write_row(self._slots.join(row), self._contexts.packing.unpack(one.context))
                    if one.reads_at_once:
                        self._read_rest(row, one.unread)
        for one in fresh:
            self._share_prompt(rows[one])
        return tuple(row.identity for row in rows.values())

    def add_in_slices(self, request: Request, limit: float) -> Generator[float, None, int]:
        """Let one row join slice by slice (`Session.add_in_slices`); there must be a place for it."""
        admitted = self._start(request, label_of(0, 1))
        if admitted.context is not None:
            return self.add([request])[0]
        batch = batch_of([admitted.prompt], self._executor.limits.prompt_block)
        self.in_slices += 1
        try:
            slices = prefill_in_slices(self._executor, batch.input_ids, batch.prompt_lengths, limit)
            with contextlib.closing(slices):
                prefilled = yield from self._timings.of_slices(slices)
            admitted.read(prefilled, 0)
            self._record_kept(admitted, 0)
            row = self._row(admitted)
            with self._all_or_none([row]):
                self._executor.insert(prefilled, 0, self._slots.join(row))
        finally:
            self.in_slices -= 1
        self._timings.prompt_tokens += len(admitted.prompt)
        self._share_prompt(row)
        return row.identity

    def _start(self, request: Request, label: str) -> Admitted:
        """Admit a request that joins now, and decide whether its row starts from a prefill or from a context."""
        admitted = self.admit(request, label)
        if request.kv_proof is not None:  # the whole prompt must be read, so no shared text is used
            assert self._lists is not None, "it has been checked"
            admitted.recorder = Recorder(self._lists.made_by, request.kv_proof, request.kv_proof_prompt)
        elif request.context is None:
            self._contexts.start_shared(admitted)
        return admitted

    def _record_kept(self, admitted: Admitted, source: int) -> None:
        """Record the tokens that the latest prefill has kept of its row `source`, if the answer has a proof."""
        if admitted.recorder is not None and self._lists is not None:
            admitted.recorder.keep(self._lists.kept(source))

    @contextlib.contextmanager
    def _all_or_none(self, rows: Iterable[Row]) -> Iterator[None]:
        """Remove the rows that have joined if the block fails, so that none is left whose number no caller knows."""
        try:
            yield
        except BaseException:
            self._slots.leave_all(row for row in rows if row in self._slots.active)
            raise

    def _prefill(self, prompts: list[list[int]]) -> Prefilled:
        batch = batch_of(prompts, self._executor.limits.prompt_block)
        tokens = int(batch.prompt_lengths.sum())
        start = time.perf_counter()
        with self._progress.task(f"prefill of {tokens} tokens", None):
            prefilled = self._executor.prefill(batch.input_ids, batch.prompt_lengths)
        self._timings.prefill_seconds += time.perf_counter() - start
        self._timings.prompt_tokens += tokens
        return prefilled

    def _row(self, admitted: Admitted) -> Row:
        text = NgramText() if self.keeps_text else None
        row = Row(self._next_identity, admitted, self._executor.limits, self._tokenizer, text)
        if admitted.context is None:
            row.check_room(len(admitted.continuation), "continuation")
        row.forced.extend(admitted.continuation)
        self.constrain(row, admitted.request.grammar)
        self._next_identity += 1
        return row

    def constrain(self, row: Row, grammar: Grammar | None) -> None:
        """Constrain the next answer of a row by a grammar; None allows any text."""
        row.constrain(None if grammar is None else self._grammars.matcher(grammar, row.ends, row.label))

    def _read_rest(self, row: Row, tokens: list[int]) -> None:
        start = time.perf_counter()
        read_rest(self._executor, row, self._slots.place(row), tokens)
        self._timings.turn_seconds += time.perf_counter() - start
        self._timings.turn_tokens += len(tokens)

    def _share_prompt(self, row: Row) -> None:
        """Store the prompt that a row has just read, for later prompts that begin with it."""
        self._contexts.share_prompt(row, lambda: self._executor.read_row(self._slots.place(row)))
