"""The tokens that one answer may take next under its grammar, computed by other threads while a model's step runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class MaskThreads:
    """A pool of threads, started by the first mask. The library that computes masks lets other threads run meanwhile.

    A fork does not copy threads. So it waits until no mask is being computed, which takes less than one step, and the
    child gets a new pool: both processes have every mask computed before, and neither waits for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()
        os.register_at_fork(before=self._rest, after_in_parent=self._lock.release, after_in_child=self._begin_anew)

    def submit(self, compute: Callable[[], bytes]) -> Future[bytes]:
        """Start `compute` on a thread of the pool, and return its future mask."""
        with self._lock:
            coming = self._pool.submit(compute)
            self._running.add(coming)
        coming.add_done_callback(self._running.discard)
        return coming

    def _begin(self) -> None:
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "kvc-trt grammar mask")
        self._running: set[Future[bytes]] = set()

    def _rest(self) -> None:
        self._lock.acquire()
        wait(self._running.copy())

    def _begin_anew(self) -> None:
        self._begin()
        self._lock.release()


_BESIDE = MaskThreads()


class Matcher:
    """The state of one answer under its grammar. `ends` [token ids] end it, and are allowed where the grammar may end.

    An end that is a `special` token, which writes no text, is also allowed where the grammar names it.

    The vocabulary of `state` has one token more than `vocab_size`, which stands for all the ends.
    """

    def __init__(
        self, state: LLMatcher, vocab_size: int, ends: Collection[int], special: Collection[int], what: str
    ) -> None:
        self._own_state, self._vocab_size, self._what = state, vocab_size, what
        self._coming: Future[bytes] | None = None
        """The bits of the next mask, if `prepare` started computing them."""
        self._ends = np.array(sorted(end for end in ends if 0 <= end < vocab_size), np.int64)
        self._may_be_named = np.isin(self._ends, list(special))

    @property
    def _state(self) -> LLMatcher:
        """The library's state; waits until the thread that computes the next mask is done with it."""
        if self._coming is not None:
            wait([self._coming])
        return self._own_state

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows nothing further: the answer ends here."""
        return bool(self._state.is_stopped())

    def prepare(self) -> None:
        """Start computing the mask that `allowed` returns next, on another thread."""
        if self._coming is None:
            self._coming = _BESIDE.submit(self._own_state.compute_bitmask)

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask [vocab], True for each token that may come next."""
        bits = self._own_state.compute_bitmask() if self._coming is None else self._coming.result()
        self._check()
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size + 1, bitorder="little").view(
            np.bool_
        )
        allowed = mask[:-1]
        allowed[self._ends] = mask[-1] | (allowed[self._ends] & self._may_be_named)
        return allowed

    def advance(self, token: int) -> None:
        """Record the token that was drawn, which must be an allowed one."""
        if token not in self._ends:
            self._state.consume_token(token)
            self._coming = None
            self._check()

    def prefix(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest prefix of `tokens` that may come next; it stops before any end token."""
        until = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        return int(self._state.validate_tokens(list(tokens[:until])))

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces next, whatever the logits, up to an end token that it may name."""
        tokens = self._state.compute_ff_tokens()
        return list(takewhile(lambda token: token < self._vocab_size and token not in self._ends, tokens))

    def copy(self) -> Matcher:
        """Return an independent copy of the current state."""
        other = copy(self)
        other._own_state, other._coming = self._state.deep_copy(), None
        return other

    def begin_answer(self) -> None:
        """Begin another answer under the same grammar."""
        self._state.reset()
        self._coming = None

    def _check(self) -> None:
        if self._state.is_error():
            raise InputError(
                f"{self._what}: the answer cannot follow its grammar any further: {reason_of(self._state)}"
            )


def reason_of(state: LLMatcher) -> str:
    """Return the library's reason for a failed state, without the notes that it adds for its developers."""
    return " ".join(state.get_error().replace("<non-verbose/>", "").split()) or state.stop_reason()
