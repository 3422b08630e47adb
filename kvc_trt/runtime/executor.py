"""What a session needs from whatever runs the two graphs: the only interface between rows and an executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.weights import count_parameters

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig

NOT_FINITE = -1
"""In place of a best token: the row's logits hold a NaN, or their largest is infinite."""

SMALL_MODEL = 20_000_000
"""Parameters below which more threads only wait for each other."""


@dataclass(frozen=True)
class Limits:
    """Fixed bounds of one engine, equal for every row."""

    vocab_size: int
    max_input_len: int
    """Longest prompt, tokens."""
    max_output_len: int
    """New tokens that every row has room for, tokens."""
    max_sequence_len: int
    """Logical positions that exist; a token at this position cannot be fed."""
    capacities: tuple[int, ...]
    """Slots of each cache, in the order of the rows of `cache_lengths`."""
    prompt_block: int
    """Padded prompt lengths are multiples of this."""
    evicting: tuple[bool, ...] | None = None
    """Per cache, whether a step drops an entry when the slots are full: such a cache takes any number of tokens, and
    its row of `cache_lengths` counts them all. None: no cache does."""


@dataclass
class Prefilled:
    """The result of one prefill run over B rows; freed once its rows are inserted."""

    logits: NDArray[np.float32]
    """[B, vocab], of each row's last prompt token."""
    cache_lengths: NDArray[np.int64]
    """[caches, B], stored tokens per cache and row."""
    state: Any
    """The executor's own: the rows' state tensors."""


class Executor(Protocol):
    """Runs prefill and decode over one buffer per state tensor; active rows are the prefix of each buffer."""

    @property
    def limits(self) -> Limits:
        """The engine's bounds."""

    @property
    def runs(self) -> int:
        """Decode runs so far."""

    def load(self) -> object:
        """Bring the engine into memory now, so that the first prompt does not wait for it."""

    def allocate(self, max_batch_size: int) -> None:
        """Make the state buffers for this many rows, filled with each tensor's fill value."""

    def state_bytes(self) -> int:
        """Bytes of the allocated state buffers."""

    def prefill(self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> Prefilled:
        """Run the prompts `input_ids` [B, S] (right padded to a multiple of `prompt_block`), `prompt_lengths` [B]."""

    def insert(self, prefilled: Prefilled, source_row: int, row: int) -> None:
        """Copy one prefilled row into row `row` of every buffer, all of it: nothing of a former row stays."""

    def move(self, source_row: int, row: int) -> None:
        """Copy row `source_row` of every buffer over row `row`."""

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """One step of the first len(tokens) rows: append `tokens` [rows] at logical `positions` [rows].

        `cache_lengths` [caches, rows] are the stored tokens before the append; the caller increments them.
        Returns logits [rows, vocab], valid until the next call.
        """


@runtime_checkable
class GreedyExecutor(Executor, Protocol):
    """An executor that can tell the best token of a step without handing out its logits, which may be on a GPU."""

    def decode_greedy(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`decode`, of which each row's best token [rows] is returned: of equal logits the lowest id, or NOT_FINITE."""


def threads_for(model: ModelConfig) -> int | None:
    """Threads that an executor of a model is given: one for a small model; None is all cores."""
    return 1 if count_parameters(model) < SMALL_MODEL else None
