"""The interface between a session and the executors that run the graphs."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.weights import count_parameters

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.progress import Progress
    from kvc_trt.runtime.logprobs import TokenLogprobs
    from kvc_trt.runtime.sampling.draw_rules import DrawRules

NOT_FINITE = -1
"""Returned instead of a token if a row's logits hold a NaN or their maximum is infinite."""
NONE_ALLOWED = -2
"""Returned instead of a token if a row's rules allow none."""

SMALL_MODEL = 20_000_000
"""A model with fewer parameters than this runs on one thread: several would mostly wait for each other."""


class NoTurns(NamedTuple):
    """The reason why an engine takes no turns of a conversation, for messages."""

    reason: str
    hint: str | None = None


class NoDrafts(NamedTuple):
    """The reason why an engine checks no drafts, for messages."""

    reason: str
    hint: str | None = None


@dataclass(frozen=True)
class Limits:
    """The fixed limits of one engine, the same for every row."""

    vocab_size: int
    max_input_len: int
    """The longest prompt in tokens."""
    max_output_len: int
    """The number of new tokens for which every row has room."""
    max_sequence_len: int
    """The number of logical positions; the last token that can be fed is at max_sequence_len - 1."""
    capacities: tuple[int, ...]
    """The number of slots of each cache, in the order of the rows of `cache_lengths`."""
    prompt_block: int
    """Padded prompt lengths are multiples of this."""
    evicting: tuple[bool, ...] | None = None
    """Per cache, whether a step drops an entry if the slots are full. Such a cache takes any number of tokens, and its
    row of `cache_lengths` counts them all. None: no cache drops entries."""
    keeping: tuple[bool, ...] | None = None
    """Per cache, whether a turn's tokens are appended and need free slots; the others compact after every turn."""
    keeps_whole: bool = False
    """True if every token is also stored outside of the caches that `capacities` counts, for turns to choose from."""
    no_turns: NoTurns | None = None
    """The reason why rows take no turns; None if they do."""
    all_logits: bool = False
    """True if a turn returns the logits after each of its tokens."""
    draft_tokens: int = 0
    """The number of draft tokens that one pass checks, beside the token that it feeds; 0 if it cannot check drafts."""
    no_drafts: NoDrafts | None = None
    """The reason why drafts cannot be checked; None if they can."""
    model_positions: int | None = None
    """The longest prompt for which an engine of this model can be built; None if it is not known."""

    def way_out(self, count: int, instead: str) -> str:
        """Return a hint for a prompt of `count` tokens, too many: `instead`, or another engine if one can take it."""
        if self.model_positions is not None and count > self.model_positions:
            return f"{instead}: no engine of this model takes more than {self.model_positions}"
        return f"{instead}, or build the engine with --max-input-len {count}"

    def room(self, position: int, cache_lengths: Iterable[int]) -> int:
        """Return the number of tokens that a row can still take, by its fullest cache and the logical positions left.

        The next token is at `position`; `cache_lengths` [caches] counts the stored tokens of each cache.
        """
        evicting = self.evicting or (False,) * len(self.capacities)
        caches = zip(self.capacities, cache_lengths, evicting, strict=True)
        free = (slots - int(stored) for slots, stored, evicts in caches if not evicts)
        return min([self.max_sequence_len - position, *free])

    def check_lengths(self, logical_length: int, cache_lengths: Sequence[int], what: str) -> None:
        """Raise InputError, naming `what`, for lengths that no row of the engine can have."""
        if not 1 <= logical_length <= self.max_sequence_len:
            raise InputError(f"{what}: {logical_length} tokens, expected at most {self.max_sequence_len}")
        if len(cache_lengths) != len(self.capacities):
            raise InputError(f"{what}: lengths of {len(cache_lengths)} caches, expected {len(self.capacities)}")
        evicting = self.evicting or (False,) * len(cache_lengths)
        for cache, (stored, slots, evicts) in enumerate(zip(cache_lengths, self.capacities, evicting, strict=True)):
            most = logical_length if evicts else min(slots, logical_length)
            if not 0 <= stored <= most:
                raise InputError(f"{what}: cache {cache} has {stored} tokens, expected at most {most}")


@dataclass
class Prefilled:
    """The result of one prefill of B rows; to be freed once its rows are inserted."""

    logits: NDArray[np.float32]
    """[B, vocab]: the logits at each row's last prompt token."""
    cache_lengths: NDArray[np.int64]
    """[caches, B]: the number of tokens stored per cache and row."""
    state: Any
    """The rows' state tensors, in the executor's own form."""


class Drawn(NamedTuple):
    """A token that an executor has drawn itself, without copying the logits to the host."""

    token: int
    """NOT_FINITE or NONE_ALLOWED if there is none."""
    logprobs: TokenLogprobs | None = None


NO_DRAW = Drawn(NOT_FINITE)
"""The placeholder of a draw for which no rule was given."""
Answer: TypeAlias = NDArray[np.float32] | Drawn
"""The model's output for one token: logits [vocab], or the token that was drawn from them."""


@dataclass(frozen=True)
class CheckedDraft:
    """The result of a pass over the tokens of a draft."""

    logits: NDArray[np.float32]
    """[tokens, rows, vocab]: the logits after each token; valid until the next pass."""
    undo: list[Any]
    """Per row, the data that `take_back` needs beside the caches."""


@dataclass(frozen=True)
class DrawnDraft:
    """The result of a pass over the tokens of a draft by an executor that draws tokens itself."""

    answers: Sequence[Sequence[Answer]]
    """[rows][tokens]: the token drawn after each token, or the logits, which are valid until the next pass."""
    undo: list[Any]
    """Per row, the data that `take_back` needs beside the caches."""


@dataclass(frozen=True)
class Extended:
    """The result of a turn of B rows."""

    logits: NDArray[np.float32]
    """[B, vocab]: the logits at each row's last new token."""
    cache_lengths: NDArray[np.int64]
    """[caches, B]: the number of tokens stored per cache and row after the turn."""
    all_logits: NDArray[np.float32] | None = None
    """[B, M, vocab]: the logits at every new token if `Limits.all_logits`; those past a turn's end have no meaning."""


class Executor(Protocol):
    """Runs prefill and decode over one buffer per state tensor. The active rows are the first ones of each buffer."""

    @property
    def limits(self) -> Limits:
        """The engine's limits."""

    @property
    def runs(self) -> int:
        """The number of decode steps run so far."""

    def load(self) -> object:
        """Load the engine now, so that the first prompt does not wait for it."""

    def allocate(self, max_batch_size: int) -> None:
        """Allocate the state buffers for `max_batch_size` rows, each filled with its tensor's fill value."""

    def state_bytes(self) -> int:
        """Return the size of the allocated state buffers in bytes."""

    def prefill(self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> Prefilled:
        """Run the prompts `input_ids` [B, S] of `prompt_lengths` [B]; S is a multiple of `prompt_block`."""

    def insert(self, prefilled: Prefilled, source_row: int, row: int) -> None:
        """Copy one prefilled row into row `row` of every buffer, replacing all that the row held before."""

    def move(self, source_row: int, row: int) -> None:
        """Copy row `source_row` of every buffer over row `row`."""

    def read_row(self, row: int) -> Mapping[str, NDArray[Any]]:
        """Return one row of every state tensor by name; valid until the next call."""

    def write_row(self, row: int, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Write row `row` of every state tensor, given by name, replacing all that the row held before."""

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Run one step of the first len(tokens) rows: append `tokens` [rows] at logical `positions` [rows].

        `cache_lengths` [caches, rows] counts the tokens stored before the append; the caller increments it.
        Returns logits [rows, vocab], valid until the next call.
        """


class ExecutorBase:
    """The shared part of all backends' executors: subclasses set `_limits`, and count their steps in `_runs`.

    By default, turns and drafts need nothing to be loaded beyond `load`.
    """

    _limits: Limits
    _runs = 0

    @property
    def limits(self) -> Limits:
        """The engine's limits."""
        return self._limits

    @property
    def runs(self) -> int:
        """The number of decode steps run so far."""
        return self._runs

    def load_turns(self) -> object:
        """Load the parts of the engine that only turns need; here there are none."""
        return None

    def load_drafts(self) -> None:
        """Load the parts of the engine that only passes over drafts need; here there are none."""


@runtime_checkable
class GreedyExecutor(Executor, Protocol):
    """An executor that can return the best token of each row without copying the logits to the host."""

    def decode_greedy(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Like `decode`, but return each row's best token [rows] (lowest id among equal logits) or NOT_FINITE."""


@runtime_checkable
class DrawingExecutor(Executor, Protocol):
    """An executor that draws tokens itself, so that their logits need not be copied to the host."""

    @property
    def draws(self) -> bool:
        """False if callers must not use `decode_drawn`; tokens are then drawn on the host."""

    def decode_drawn(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64],
        rules: Iterable[DrawRules | None],
    ) -> list[Answer]:  # fmt: skip
        """Like `decode`, but draw each row's next token by its rules; a row with None gets its logits.

        The rules are iterated after the step has begun, so that making them overlaps with it. A row whose rules are too
        large for the executor's buffers gets its logits, too. Logits are valid until the next call.
        """


@runtime_checkable
class WarmingExecutor(Executor, Protocol):
    """An executor that prepares parts of itself, such as kernels, on their first use."""

    def warm_up(self, progress: Progress, *, drafts: bool) -> None:
        """Prepare them now, after `allocate`, for every number of rows; with `drafts`, also those for drafts."""


@runtime_checkable
class ClosingExecutor(Executor, Protocol):
    """An executor with processes of its own, which `close` ends without waiting for garbage collection."""

    def close(self) -> None:
        """End the executor's processes; it cannot be used again."""


@runtime_checkable
class TurnExecutor(Executor, Protocol):
    """An executor that reads many new tokens per row at once."""

    def load_turns(self) -> object:
        """Load the parts of the engine that turns need, so that the first turn does not wait for them."""

    def extend(
        self, first_row: int, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], positions: NDArray[np.int64],
        cache_lengths: NDArray[np.int64],
    ) -> Extended:  # fmt: skip
        """Let the B rows from `first_row` on take a turn, in their buffers: `input_ids` [B, M] of `lengths` [B].

        `positions` [B] are the logical positions of the first new tokens; `cache_lengths` [caches, B] counts the
        tokens stored before the turn. Caches that keep everything have free slots for the new tokens.
        """


@runtime_checkable
class DraftExecutor(Executor, Protocol):
    """An executor that runs several decode steps in one pass, for tokens that are known beforehand."""

    def load_drafts(self) -> None:
        """Load the parts of the engine that draft passes need, so that the first pass does not wait for them."""

    def check_draft(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> CheckedDraft:
        """Run the steps of `tokens` [1 + draft_tokens, rows] of the first rows, the first at `positions` [rows].

        `cache_lengths` [caches, rows] counts the tokens stored before. Each step reads the same entries as in `decode`.
        """

    def take_back(self, row: int, undo: Any, cache_lengths: NDArray[np.int64], kept: int) -> None:
        """Undo the steps of the latest pass of this row except the first `kept`; `undo` is the row's entry of the pass.

        `cache_lengths` [caches] counts the tokens stored before the pass. Afterwards the state is as if only the kept
        tokens had been fed, except for entries past the row's end, which have no meaning.
        """


@runtime_checkable
class DrawingDraftExecutor(DraftExecutor, Protocol):
    """An executor that also draws tokens itself in passes over drafts."""

    @property
    def draws(self) -> bool:
        """False if callers must not use `check_draft_drawn`; tokens are then drawn on the host."""

    def check_draft_drawn(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64],
        rules: Iterable[Sequence[DrawRules | None]],
    ) -> DrawnDraft:  # fmt: skip
        """Like `check_draft`, but draw a token after each of a row's first tokens by `rules`, which are [rows][tokens].

        After a token whose rule is None, or too large for the executor's buffers, the answer is the logits; after
        tokens beyond a row's rules it is NO_DRAW.
        """


@runtime_checkable
class SlicingExecutor(Executor, Protocol):
    """An executor whose prefill can pause between slices, so that steps of other rows run meanwhile."""

    def prepare_slices(self) -> None:
        """Load and measure everything that slices need, so that the first prompt does not wait for it."""

    def prefill_in_slices(
        self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64], limit: float
    ) -> Generator[float, None, Prefilled]:
        """Run the prompt `input_ids` [1,S] of `prompt_lengths` [1], one slice per `next`; return the same as `prefill`.

        Yields the share of the slices that have run, from 0 to 1. A slice takes at most `limit` seconds if the executor
        can cut so finely. Closing the generator abandons the prefill.
        """


def prefill_in_slices(
    executor: Executor, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64], limit: float
) -> Generator[float, None, Prefilled]:
    """Like `SlicingExecutor.prefill_in_slices`, for any executor; one without slices runs the whole prefill at once."""
    if isinstance(executor, SlicingExecutor):
        return (yield from executor.prefill_in_slices(input_ids, prompt_lengths, limit))
    return executor.prefill(input_ids, prompt_lengths)


def threads_for(model: ModelConfig) -> int | None:
    """Return the number of threads for an executor of `model`: one for a small model, None (all cores) otherwise."""
    return 1 if count_parameters(model) < SMALL_MODEL else None
