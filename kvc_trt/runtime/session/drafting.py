"""Speculative decoding in a session: check the drafts of all rows in one pass, and feed the accepted tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvc_trt.errors import InputError
from kvc_trt.runtime.executor import Answer, DraftExecutor, DrawingDraftExecutor, Executor
from kvc_trt.runtime.request import Event
from kvc_trt.runtime.session.row import Row
from kvc_trt.runtime.speculation.drafts import Draft
from kvc_trt.runtime.speculation.payoff import Payoff
from kvc_trt.runtime.speculation.settings import NGRAM, Speculation
from kvc_trt.runtime.timings import Timings


class Drafting:
    """Feeds rows the tokens of drafts if that saves time.

    A pass stores all tokens of a draft. The row's own sampler then draws token by token, and accepts the draft's tokens
    as long as they are equal; the others are taken back before anything else is done with the row.
    """

    def __init__(self, executor: Executor, speculation: Speculation, timings: Timings) -> None:
        limits = executor.limits
        if limits.no_drafts is not None:
            raise InputError(f"speculate: {limits.no_drafts.reason}", hint=limits.no_drafts.hint)
        if not isinstance(executor, DraftExecutor):
            raise InputError("speculate: this executor checks no drafts", hint="run the engine with another --backend")
        asked = limits.draft_tokens if speculation.tokens is None else speculation.tokens
        if not 1 <= asked <= limits.draft_tokens:
            raise InputError(
                f"speculate: drafts of {asked} tokens, expected 1 to {limits.draft_tokens} (the engine's draft_tokens)",
                hint=f"--speculate {NGRAM}:{limits.draft_tokens}, or build the engine with --draft-tokens {asked}",
            )
        self._executor, self._timings = executor, timings
        self._drawing = executor if isinstance(executor, DrawingDraftExecutor) and executor.draws else None
        self._tokens, self._fed = asked, 1 + limits.draft_tokens
        self._balance = Payoff()
        executor.load_drafts()

    def run(self, rows: Sequence[Row]) -> bool:
        """Feed all rows, which are the first ones of the buffers, with one pass over their drafts.

        Return False, and feed nothing, if a plain step is likely to be faster, if the tokens would not fit, or if a row
        records the tokens that each step reads, which a pass does not report.
        """
        start = time.perf_counter()
        for place, row in enumerate(rows):
            self.take_back(row, place)
        if any(row.recorder is not None for row in rows):
            return False
        if not self._balance.affords() or min(row.room() for row in rows) < self._fed:
            return False
        drafts = [row.draft(self._tokens) for row in rows]
        self._balance.spent(len(rows), time.perf_counter() - start)
        if not self._balance.pays(len(rows), sum(draft.expected for draft in drafts)):
            return False
        self._check(rows, drafts)
        return True

    def _check(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> None:
        """Run a pass; every row has fed its next token then, and stored the tokens of its draft."""
        tokens = [_padded([row.feed(), *draft.tokens], self._fed) for row, draft in zip(rows, drafts, strict=True)]
        positions = np.array([row.position for row in rows], np.int64)
        lengths = np.stack([row.cache_lengths for row in rows], axis=1)
        start = time.perf_counter()
        given = np.array(tokens, np.int64).T.copy(), positions, lengths
        answers: Sequence[Sequence[Answer]]
        if self._drawing is None:
            for row in rows:
                row.prepare()
            checked = self._executor.check_draft(*given)
            answers, undo = [list(of_row) for of_row in checked.logits.swapaxes(0, 1)], checked.undo
        else:
            rules = (row.draw_rules(own) for row, own in zip(rows, tokens, strict=True))
            drawn = self._drawing.check_draft_drawn(*given, rules)
            answers, undo = drawn.answers, drawn.undo
        seconds = time.perf_counter() - start
        for place, row in enumerate(rows):
            row.fed(answers[place][0])
            row.store(tokens[place][1:], answers[place][1:], undo[place])
        self._balance.passed(len(rows), seconds)
        self._timings.decode_seconds += seconds
        self._timings.decode_runs += 1
        self._timings.decode_tokens += len(rows)
        self._timings.draft_runs += 1
        self._timings.drafted_tokens += sum(len(draft.tokens) for draft in drafts)
        for row in rows:
            count = 0
            while row.forced and row.feed_stored():
                count += 1
            self._accepted(len(rows), count)

    def follow(self, row: Row, rows: int) -> list[Event]:
        """Feed one of `rows` rows while the token that it has drawn is stored already; return its further events."""
        events: list[Event] = []
        while row.feed_stored():
            events.append(row.sample())
            if events[-1].output is not None:
                break
        self._accepted(rows, len(events))
        return events

    def stepped(self, rows: int, seconds: float) -> None:
        """Record the time of a plain step."""
        self._balance.stepped(rows, seconds)

    def take_back(self, row: Row, place: int) -> None:
        """Undo the stored tokens of a row's draft that were not fed; the row is at `place` of the buffers."""
        stored = row.stored
        if stored is not None:
            if stored.left:
                self._executor.take_back(place, stored.undo, stored.cache_lengths, stored.kept)
            row.stored = None

    def _accepted(self, rows: int, count: int) -> None:
        self._balance.accepted(rows, count)
        self._timings.decode_tokens += count
        self._timings.accepted_tokens += count


def _padded(tokens: list[int], count: int) -> list[int]:
    return tokens + tokens[-1:] * (count - len(tokens))
