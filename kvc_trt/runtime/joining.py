"""How requests join a session: they are checked, and their rows start from a prefill or from a stored context."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.progress import Progress
from kvc_trt.runtime.batch import batch_of
from kvc_trt.runtime.context_store import ContextStore
from kvc_trt.runtime.executor import Executor, Prefilled, prefill_in_slices
from kvc_trt.runtime.places import Places
from kvc_trt.runtime.request import Request, check_request
from kvc_trt.runtime.row import Answer, Row, Start
from kvc_trt.runtime.timings import Timings
from kvc_trt.runtime.turn import read_rest

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Joining:
    """Makes rows of requests, numbers them and puts them behind the active rows of `places`."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        places: Places,
        contexts: ContextStore,
        timings: Timings,
        *,
        end_token_ids: Iterable[int],
        progress: Progress,
    ) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._places = places
        self._contexts = contexts
        self._timings = timings
        self._end_token_ids = frozenset(end_token_ids)
        self._progress = progress
        self._next_identity = 0
        self.in_slices = 0
        """Rows that are taken by prefills that run in slices and have not ended."""

    def check(self, request: Request, what: str) -> tuple[list[int], list[int], int]:
        """Return (prompt ids, continuation ids, max_new_tokens); InputError, naming `what`, for an invalid request."""
        limits = self._executor.limits
        if request.stop_strings and self._tokenizer is None:
            raise InputError(f"{what}: stop strings need a tokenizer, and this engine has none")
        if request.stay and limits.no_turns is not None:
            raise InputError(f"{what}: {limits.no_turns.reason}", hint=limits.no_turns.hint)
        if request.context is not None:
            self._contexts.check(request.context, f"{what}: its context")
        return check_request(request, limits, what)

    def add(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Let rows join with one batched prefill (`Session.add`); there must be places for all of them."""
        prompts = [
            self.check(request, f"prompt {i}" if len(requests) > 1 else "prompt") for i, request in enumerate(requests)
        ]
        starts = [self._contexts.start_of(request, *prompts[i]) for i, request in enumerate(requests)]
        fresh = [i for i, start in enumerate(starts) if start.context is None]
        answers = {i: start.answer() for i, start in enumerate(starts) if start.context is not None}
        if fresh:
            prefilled = self._prefill([prompts[i][0] for i in fresh])
            for place, i in enumerate(fresh):
                answers[i] = prefilled.logits[place], prefilled.cache_lengths[:, place].copy()
        joining = [self._row(one, *prompts[i], starts[i], *answers[i]) for i, one in enumerate(requests)]
        for place, i in enumerate(fresh):
            self._executor.insert(prefilled, place, self._places.make_room())
            self._places.active.append(joining[i])
        # Contexts are written last: prefilled rows may wait in rows that are still free.
        for row, start in zip(joining, starts, strict=True):
            if start.context is not None:
                self._executor.write_row(self._places.make_room(), self._contexts.packing.unpack(start.context))
                self._places.active.append(row)
                if start.at_once:
                    self._read_rest(row, start.unread)
        if self._contexts.stores_prompts:
            for i in fresh:
                self._contexts.share_prompt(joining[i], self._state_of(joining[i]))
        return tuple(row.identity for row in joining)

    def add_in_slices(self, request: Request, limit: float) -> Generator[None, None, int]:
        """Let one row join slice by slice (`Session.add_in_slices`); there must be a place for it."""
        checked = self.check(request, "prompt")
        start = self._contexts.start_of(request, *checked)
        if start.context is not None:
            return self.add([request])[0]
        batch = batch_of(checked[:1], self._executor.limits.prompt_block)
        self.in_slices += 1
        try:
            slices = prefill_in_slices(self._executor, batch.input_ids, batch.prompt_lengths, limit)
            with contextlib.closing(slices):
                prefilled = yield from self._timings.of_slices(slices)
            row = self._row(request, *checked, start, prefilled.logits[0], prefilled.cache_lengths[:, 0])
            self._executor.insert(prefilled, 0, self._places.make_room())
            self._places.active.append(row)
        finally:
            self.in_slices -= 1
        self._timings.prompt_tokens += len(checked[0])
        if self._contexts.stores_prompts:
            self._contexts.share_prompt(row, self._state_of(row))
        return row.identity

    def _prefill(self, prompts: list[list[int]]) -> Prefilled:
        batch = batch_of(prompts, self._executor.limits.prompt_block)
        tokens = int(batch.prompt_lengths.sum())
        start = time.perf_counter()
        with self._progress.task(f"prefill of {tokens} tokens", None):
            prefilled = self._executor.prefill(batch.input_ids, batch.prompt_lengths)
        self._timings.prefill_seconds += time.perf_counter() - start
        self._timings.prompt_tokens += tokens
        return prefilled

    def _row(
        self,
        request: Request,
        prompt: list[int],
        continuation: list[int],
        max_new_tokens: int,
        start: Start,
        answer: Answer,
        cache_lengths: NDArray[np.int64],
    ) -> Row:
        row = Row(
            self._next_identity,
            request,
            prompt,
            max_new_tokens,
            start=start,
            answer=answer,
            cache_lengths=cache_lengths,
            limits=self._executor.limits,
            end_token_ids=self._end_token_ids,
            tokenizer=self._tokenizer,
        )
        if start.context is None:
            row.check_room(len(continuation), "continuation")
        row.forced.extend(continuation)
        self._next_identity += 1
        return row

    def _read_rest(self, row: Row, tokens: list[int]) -> None:
        start = time.perf_counter()
        read_rest(self._executor, row, self._places.place(row), tokens)
        self._timings.turn_seconds += time.perf_counter() - start
        self._timings.turn_tokens += len(tokens)

    def _state_of(self, row: Row) -> Mapping[str, NDArray[Any]]:
        return self._executor.read_row(self._places.place(row))
