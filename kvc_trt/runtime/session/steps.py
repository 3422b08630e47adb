"""Feed the active rows of a session their next tokens, with a decode step or a pass over the drafts of all rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvc_trt.runtime.executor import Answer, DrawingExecutor, Drawn, Executor, GreedyExecutor
from kvc_trt.runtime.session.drafting import Drafting
from kvc_trt.runtime.session.reported_lists import ReportedLists, record_step
from kvc_trt.runtime.session.row import Row
from kvc_trt.runtime.session.row_failures import Failures, failure_of
from kvc_trt.runtime.timings import Timings


class Steps:
    """Runs an executor over rows, which are the first ones of its buffers.

    Without `drafting` no drafts are made; rows with a proof record the tokens that `lists` reports.
    """

    def __init__(
        self, executor: Executor, drafting: Drafting | None, timings: Timings, lists: ReportedLists | None = None
    ) -> None:
        self._executor, self._drafting, self._timings, self._lists = executor, drafting, timings, lists
        self._greedy = executor if isinstance(executor, GreedyExecutor) else None
        self._drawing = executor if isinstance(executor, DrawingExecutor) and executor.draws else None

    def run(self, rows: Sequence[Row]) -> Failures:
        """Feed every row its queued or sampled token; return the errors of rows that failed to record the output.

        If the executor finds the best tokens itself, or draws by rules, the logits stay on the device, and only a few
        bytes per step are copied to the host.
        """
        if self._drafting is not None and self._drafting.run(rows):
            return {}
        start = time.perf_counter()
        answers = self._decode(
            rows,
            np.array([row.feed() for row in rows], np.int64),
            np.array([row.position for row in rows], np.int64),
            np.stack([row.cache_lengths for row in rows], axis=1),
        )
        seconds = time.perf_counter() - start
        if self._drafting is not None:
            self._drafting.stepped(len(rows), seconds)
        self._timings.decode_seconds += seconds
        self._timings.decode_runs += 1
        self._timings.decode_tokens += len(rows)
        failed: Failures = {}
        for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            with failure_of(row, failed):
                if self._lists is not None:
                    record_step(self._lists, row, place)
                row.fed(answer)
        return failed

    def _decode(
        self,
        rows: Sequence[Row],
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        cache_lengths: NDArray[np.int64],
    ) -> Iterable[Answer]:
        if self._greedy is not None and all(row.is_greedy for row in rows):
            return [Drawn(best) for best in self._greedy.decode_greedy(tokens, positions, cache_lengths).tolist()]
        if self._drawing is not None:
            rules = (row.draw_rules([row.feed()])[0] for row in rows)
            return self._drawing.decode_drawn(tokens, positions, cache_lengths, rules)
        for row in rows:
            row.prepare()
        return self._executor.decode(tokens, positions, cache_lengths)
