"""How requests join a session: they are checked, and their rows start from a prefill or from a stored context."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.progress import Progress
from kvc_trt.proof import Recorder
from kvc_trt.runtime.context import NO_TOKENS, extended_digest
from kvc_trt.runtime.executor import Executor, Limits, Prefilled, prefill_in_slices
from kvc_trt.runtime.request import Checked, Request, check_request, check_token_ids
from kvc_trt.runtime.sampling.banned import banned_sequences, check_leaves_a_token
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.runtime.session.context_store import ContextStore
from kvc_trt.runtime.session.reported_lists import ReportedLists
from kvc_trt.runtime.session.row import Answer, Row, Start
from kvc_trt.runtime.session.row_slots import RowSlots
from kvc_trt.runtime.session.turn import read_rest
from kvc_trt.runtime.speculation.ngram import NgramText
from kvc_trt.runtime.timings import Timings

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(eq=False)
class _Newcomer:
    """A checked request on its way into the session."""

    request: Request
    checked: Checked
    start: Start
    answer: tuple[Answer, NDArray[np.int64]] | None = None
    """What the row begins with: logits [vocab], and cache lengths [caches]; None until its prompt has been read."""
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        if self.start.context is not None:
            self.answer = self.start.answer()

    def read(self, prefilled: Prefilled, source: int) -> None:
        """Take the answer to the prompt from row `source` of a prefill."""
        self.answer = prefilled.logits[source], prefilled.cache_lengths[:, source].copy()


class Joining:
    """Makes rows of requests, numbers them and puts them behind the active rows of `slots`."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        slots: RowSlots,
        contexts: ContextStore,
        timings: Timings,
        *,
        end_token_ids: Iterable[int],
        lists: ReportedLists | None,
        progress: Progress,
    ) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._slots = slots
        self._contexts = contexts
        self._timings = timings
        self._end_token_ids = frozenset(end_token_ids)
        self._lists = lists
        self._progress = progress
        self._next_identity = 0
        self.keeps_text = False
        """Whether rows keep the tokens they read, to make drafts of them."""
        self.in_slices = 0
        """Rows that are taken by prefills that run in slices and have not ended."""

    def check(self, request: Request, what: str) -> Checked:
        """Return what a request asks for; InputError, naming `what`, for one that is invalid or can never fit."""
        limits = self._executor.limits
        if request.stop_strings and self._tokenizer is None:
            raise InputError(f"{what}: stop strings need a tokenizer, and this engine has none")
        if request.stay and limits.no_turns is not None:
            raise InputError(f"{what}: {limits.no_turns.reason}", hint=limits.no_turns.hint)
        if request.kv_proof is not None:
            _check_proof(request, self._lists, what)
        if request.context is not None:
            self._contexts.check(request.context, f"{what}: its context")
        checked = check_request(request, limits, what)
        if request.context is not None:
            self._contexts.start_after(request.context, checked, what)
        else:
            _check_continuation(checked, limits, what)
        banned = banned_sequences(request, self._tokenizer, limits, what)
        ends = {*request.stop_token_ids, *(() if request.ignore_eos else self._end_token_ids)}
        check_leaves_a_token(banned, ends if request.min_tokens else (), limits, what)
        _check_context_text(request, any(len(sequence) > 1 for sequence in banned), limits, what)
        return checked._replace(banned=banned)

    def add(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Let rows join with one batched prefill (`Session.add`); there must be places for all of them."""
        newcomers = [
            self._newcomer(request, f"prompt {i}" if len(requests) > 1 else "prompt")
            for i, request in enumerate(requests)
        ]
        fresh = [one for one in newcomers if one.start.context is None]
        prefilled = self._prefill([one.checked.prompt for one in fresh]) if fresh else None
        if prefilled is not None:
            for source, one in enumerate(fresh):
                one.read(prefilled, source)
                self._keep(one, source)
        rows = {one: self._row(one) for one in newcomers}
        with self._all_or_none(rows.values()):
            if prefilled is not None:
                for source, one in enumerate(fresh):
                    self._executor.insert(prefilled, source, self._slots.join(rows[one]))
            # Contexts are written last: prefilled rows may wait in rows that are still free.
            for one, row in rows.items():
                if one.start.context is not None:
                    self._executor.write_row(self._slots.join(row), self._contexts.packing.unpack(one.start.context))
                    if one.start.at_once:
                        self._read_rest(row, one.start.unread)
        for one in fresh:
            self._share_prompt(rows[one])
        return tuple(row.identity for row in rows.values())

    def add_in_slices(self, request: Request, limit: float) -> Generator[None, None, int]:
        """Let one row join slice by slice (`Session.add_in_slices`); there must be a place for it."""
        newcomer = self._newcomer(request, "prompt")
        if newcomer.start.context is not None:
            return self.add([request])[0]
        prompt = newcomer.checked.prompt
        batch = batch_of([prompt], self._executor.limits.prompt_block)
        self.in_slices += 1
        try:
            slices = prefill_in_slices(self._executor, batch.input_ids, batch.prompt_lengths, limit)
            with contextlib.closing(slices):
                prefilled = yield from self._timings.of_slices(slices)
            newcomer.read(prefilled, 0)
            self._keep(newcomer, 0)
            row = self._row(newcomer)
            with self._all_or_none([row]):
                self._executor.insert(prefilled, 0, self._slots.join(row))
        finally:
            self.in_slices -= 1
        self._timings.prompt_tokens += len(prompt)
        self._share_prompt(row)
        return row.identity

    def _newcomer(self, request: Request, what: str) -> _Newcomer:
        checked = self.check(request, what)
        if request.kv_proof is None:
            return _Newcomer(request, checked, self._contexts.start_of(request.context, checked, what))
        assert self._lists is not None, "it has been checked"
        recorder = Recorder(self._lists.made_by, request.kv_proof, request.kv_proof_prompt)
        # The whole prompt is read: no shared text stands for its beginning.
        start = Start() if request.context is None else self._contexts.start_after(request.context, checked, what)
        return _Newcomer(request, checked, start, recorder=recorder)

    def _keep(self, newcomer: _Newcomer, source: int) -> None:
        """Record what the latest prefill has kept of its row `source`, if a proof is asked for."""
        if newcomer.recorder is not None and self._lists is not None:
            newcomer.recorder.keep(self._lists.kept(source))

    @contextlib.contextmanager
    def _all_or_none(self, rows: Iterable[Row]) -> Iterator[None]:
        """Let rows that have joined leave again if the rest of it fails, so that no unknown row is left behind."""
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

    def _row(self, newcomer: _Newcomer) -> Row:
        checked, start = newcomer.checked, newcomer.start
        assert newcomer.answer is not None, "its prompt has been read"
        answer, cache_lengths = newcomer.answer
        row = Row(
            self._next_identity,
            newcomer.request,
            checked.prompt,
            checked.max_new_tokens,
            start=start,
            answer=answer,
            cache_lengths=cache_lengths,
            limits=self._executor.limits,
            end_token_ids=self._end_token_ids,
            tokenizer=self._tokenizer,
            banned=checked.banned,
            recorder=newcomer.recorder,
            text=NgramText() if self.keeps_text else None,
        )
        if start.context is None:
            row.check_room(len(checked.continuation), "continuation")
        row.forced.extend(checked.continuation)
        self._next_identity += 1
        return row

    def _read_rest(self, row: Row, tokens: list[int]) -> None:
        start = time.perf_counter()
        read_rest(self._executor, row, self._slots.place(row), tokens)
        self._timings.turn_seconds += time.perf_counter() - start
        self._timings.turn_tokens += len(tokens)

    def _share_prompt(self, row: Row) -> None:
        """Store the prompt that a row has just read, for others that begin with it."""
        self._contexts.share_prompt(row, lambda: self._executor.read_row(self._slots.place(row)))


def _check_proof(request: Request, lists: ReportedLists | None, what: str) -> None:
    """Raise InputError for a proof that cannot be given."""
    if lists is None:
        raise InputError(
            f"{what}: a KV proof is asked for, and the engine was not opened for proofs",
            hint="Engine.open(ENGINE_DIR, proofs=True), kvc-trt run --kv-proof, or kvc-trt serve --kv-proofs",
        )
    begun = request.kv_proof_prompt
    if request.context is not None and begun is None:
        raise InputError(f"{what}: a KV proof covers the whole prompt, and a stored context is not read again")
    if begun is not None and (request.context is None or not request.context_token_ids or request.prompt_token_ids):
        raise InputError(f"{what}: the record of a prompt goes with its context and its tokens, and no others")
    if begun is not None and begun.kind != request.kv_proof:
        raise InputError(f"{what}: a proof of kind {request.kv_proof} cannot go on from a record of {begun.kind}")
    if request.stay:
        raise InputError(f"{what}: a KV proof covers a prompt and one answer, and no further turns")


def _check_context_text(request: Request, bans_sequences: bool, limits: Limits, what: str) -> None:
    """Raise InputError unless the text of a request's context is known where sampling looks back at it."""
    if request.context is None:
        if request.context_token_ids:
            raise InputError(f"{what}: context_token_ids without a context")
        return
    if request.context_token_ids:
        tokens = check_token_ids(request.context_token_ids, limits, f"{what}: context_token_ids")
        if extended_digest(NO_TOKENS, tokens) != request.context.token_digest:
            raise InputError(
                f"{what}: context_token_ids are not the {request.context.logical_length} tokens of its context"
            )
        return
    for rule, looks_back in (
        ("a repetition penalty", request.sampling.repetition_penalty != 1.0),
        ("a banned sequence of several tokens", bans_sequences),
    ):
        if looks_back:
            raise InputError(
                f"{what}: {rule} looks back at the text, and of a stored context only a digest is known",
                hint="give its tokens (Request.context_token_ids in Python), or the whole text as the prompt",
            )


def _check_continuation(checked: Checked, limits: Limits, what: str) -> None:
    """Raise InputError for a continuation that cannot fit after its prompt, however little of that is kept."""
    keeping = limits.keeping or (False,) * len(limits.capacities)
    at_least = [len(checked.prompt) if keeps else 0 for keeps in keeping]
    if len(checked.continuation) > limits.room(len(checked.prompt), at_least):
        raise InputError(
            f"{what}: continuation: {len(checked.continuation)} tokens do not fit after {len(checked.prompt)} tokens, "
            f"found room for {limits.room(len(checked.prompt), at_least)}",
            hint="build the engine with a larger --max-output-len",
        )
