"""The interface between a session and whatever runs the graphs."""

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
"""Returned instead of a token when a row's logits hold a NaN or their largest is infinite."""
NONE_ALLOWED = -2
"""Returned instead of a token when a row's rules allow none."""

SMALL_MODEL = 20_000_000
"""A model with fewer parameters runs on one thread: more would only wait for each other."""


class NoTurns(NamedTuple):
    """Why an engine takes no turns of a conversation."""

    reason: str
    hint: str | None = None


class NoDrafts(NamedTuple):
    """Why an engine checks no drafts."""

    reason: str
    hint: str | None = None


@dataclass(frozen=True)
class Limits:
    """The fixed limits of one engine, the same for every row."""

    vocab_size: int
    max_input_len: int
    """Longest prompt, tokens."""
    max_output_len: int
    """New tokens for which every row has room."""
    max_sequence_len: int
    """Number of logical positions; the last token that can be fed is at max_sequence_len - 1."""
    capacities: tuple[int, ...]
    """Slots of each cache, in the order of the rows of `cache_lengths`."""
    prompt_block: int
    """Padded prompt lengths are multiples of this."""
    evicting: tuple[bool, ...] | None = None
    """Per cache, whether a step drops an entry when the slots are full. Such a cache takes any number of tokens, and
    its row of `cache_lengths` counts them all. None means that no cache does."""
    keeping: tuple[bool, ...] | None = None
    """Per cache, whether a turn's tokens are appended and need free slots; the others compact after every turn."""
    keeps_whole: bool = False
    """True if every token is kept beside the caches that `capacities` are of, for turns to choose from."""
    no_turns: NoTurns | None = None
    """Why rows take no turns; None if they do."""
    all_logits: bool = False
    """True if a turn gives the logits after each of its tokens."""
    draft_tokens: int = 0
    """How many tokens of a draft one pass checks, besides the token that it feeds; 0 if drafts cannot be checked."""
    no_drafts: NoDrafts | None = None
    """Why drafts cannot be checked; None if they can."""
    model_positions: int | None = None
    """The longest prompt that an engine of this model can be built for; None where that is not known."""

    def way_out(self, count: int, instead: str) -> str:
        """Return what to do about `count` tokens, more than max_input_len: `instead`, or another engine if it helps."""
        if self.model_positions is not None and count > self.model_positions:
            return f"{instead}: no engine of this model takes more than {self.model_positions}"
        return f"{instead}, or build the engine with --max-input-len {count}"

    def room(self, position: int, cache_lengths: Iterable[int]) -> int:
        """Return how many tokens a row can still take, by the fullest cache and by the logical positions left.

        The next token is at `position`; `cache_lengths` counts what each cache has stored.
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
    """The result of one prefill of B rows; freed once its rows are inserted."""

    logits: NDArray[np.float32]
    """[B, vocab]: the logits at each row's last prompt token."""
    cache_lengths: NDArray[np.int64]
    """[caches, B]: tokens stored per cache and row."""
    state: Any
    """The rows' state tensors, in the executor's own form."""


class Drawn(NamedTuple):
    """A token that an executor has drawn itself; the logits stay where they are."""

    token: int
    """NOT_FINITE or NONE_ALLOWED if there is none."""
    logprobs: TokenLogprobs | None = None


NO_DRAW = Drawn(NOT_FINITE)
"""Stands for a draw that no rule was given for."""
Answer: TypeAlias = NDArray[np.float32] | Drawn
"""The model's output for one token: logits [vocab], or the token that was drawn from them."""


@dataclass(frozen=True)
class CheckedDraft:
    """The result of a pass over the tokens of a draft."""

    logits: NDArray[np.float32]
    """[tokens, rows, vocab]: after each token; valid until the next pass."""
    undo: list[Any]
    """Per row, what `take_back` needs besides the caches."""


@dataclass(frozen=True)
class DrawnDraft:
    """The result of a pass over the tokens of a draft whose executor draws tokens itself."""

    answers: Sequence[Sequence[Answer]]
    """[rows][tokens]: after each token; logits are valid until the next pass."""
    undo: list[Any]
    """Per row, as in a `CheckedDraft`."""


@dataclass(frozen=True)
class Extended:
    """The result of a turn of B rows."""

    logits: NDArray[np.float32]
    """[B, vocab]: the logits at each row's last new token."""
    cache_lengths: NDArray[np.int64]
    """[caches, B]: tokens stored per cache and row after the turn."""
    all_logits: NDArray[np.float32] | None = None
    """[B, M, vocab]: the logits at every new token, where `Limits.all_logits`; rows past a turn's end do not count."""


class Executor(Protocol):
    """Runs prefill and decode over one buffer per state tensor. The active rows are the first ones of each buffer."""

    @property
    def limits(self) -> Limits:
        """The engine's limits."""

    @property
    def runs(self) -> int:
        """Number of decode steps run so far."""

    def load(self) -> object:
        """Bring the engine into memory now, so that the first prompt does not wait for it."""

    def allocate(self, max_batch_size: int) -> None:
        """Allocate the state buffers for this many rows, filled with each tensor's fill value."""

    def state_bytes(self) -> int:
        """Return the size of the allocated state buffers in bytes."""

    def prefill(self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> Prefilled:
        """Run the prompts `input_ids` [B, S] of `prompt_lengths` [B]; S is a multiple of `prompt_block`."""

    def insert(self, prefilled: Prefilled, source_row: int, row: int) -> None:
        """Copy all of one prefilled row into row `row` of every buffer; nothing of a former row is left."""

    def move(self, source_row: int, row: int) -> None:
        """Copy row `source_row` of every buffer over row `row`."""

    def read_row(self, row: int) -> Mapping[str, NDArray[Any]]:
        """Return one row of every state tensor, by name; valid until the next call."""

    def write_row(self, row: int, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Write row `row` of every state tensor, given by name; nothing of a former row is left."""

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Run one step of the first len(tokens) rows: append `tokens` [rows] at logical `positions` [rows].

        `cache_lengths` [caches, rows] counts the tokens stored before the append; the caller increments it.
        Returns logits [rows, vocab], valid until the next call.
        """


class ExecutorBase:
    """The shared part of all backends' executors: they set `_limits`, and count their steps in `_runs`.

    Turns and drafts run on what prompts and steps have loaded, unless an executor loads more.
    """

    _limits: Limits
    _runs = 0

    @property
    def limits(self) -> Limits:
        """The engine's limits."""
        return self._limits

    @property
    def runs(self) -> int:
        """Number of decode steps run so far."""
        return self._runs

    def load_turns(self) -> object:
        """Load what turns need besides."""
        return None

    def load_drafts(self) -> None:
        """Load what passes over drafts need besides."""


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
        """False if it is not to be asked to draw: tokens are then drawn on the host."""

    def decode_drawn(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64],
        rules: Iterable[DrawRules | None],
    ) -> list[Answer]:  # fmt: skip
        """Like `decode`, but draw each row's next token by its rules; None asks for its logits, valid until the next
        call.

        The rules are looked at after the step has begun: what they take to make passes beside it. For rules that are
        too large for its buffers, an executor returns logits too.
        """


@runtime_checkable
class WarmingExecutor(Executor, Protocol):
    """An executor that prepares something when it is needed first."""

    def warm_up(self, progress: Progress, *, drafts: bool) -> None:
        """Prepare it now, after `allocate`, for every number of rows; with `drafts`, also for passes over them."""


@runtime_checkable
class ClosingExecutor(Executor, Protocol):
    """An executor with processes of its own, which end when it is closed and not only when it is collected."""

    def close(self) -> None:
        """End them; the executor cannot be used again."""


@runtime_checkable
class TurnExecutor(Executor, Protocol):
    """An executor that reads many new tokens per row at once."""

    def load_turns(self) -> object:
        """Load what turns need now, so that the first one does not wait for it."""

    def extend(
        self, first_row: int, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], positions: NDArray[np.int64],
        cache_lengths: NDArray[np.int64],
    ) -> Extended:  # fmt: skip
        """Run a turn of the B rows from `first_row` on, in their buffers: `input_ids` [B, M] of `lengths` [B].

        `positions` [B] are the logical positions of the first new tokens; `cache_lengths` [caches, B] counts the
        tokens stored before the turn. Caches that keep everything have free slots for the new tokens.
        """


@runtime_checkable
class DraftExecutor(Executor, Protocol):
    """An executor that runs several decode steps in one pass, for tokens that are known beforehand."""

    def load_drafts(self) -> None:
        """Load what passes need, so that the first one does not wait for it."""

    def check_draft(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64]
    ) -> CheckedDraft:
        """Run the steps of `tokens` [1 + draft_tokens, rows] of the first rows, the first at `positions` [rows].

        `cache_lengths` [caches, rows] counts the tokens stored before. Each step reads what it would read by itself.
        """

    def take_back(self, row: int, undo: Any, cache_lengths: NDArray[np.int64], kept: int) -> None:
        """Undo the steps of the latest pass of this row except the first `kept`; `undo` is the pass's for the row.

        `cache_lengths` [caches] counts the tokens stored before the pass. The state is then as if only the kept ones
        had been fed; entries past a row's end do not count.
        """


@runtime_checkable
class DrawingDraftExecutor(DraftExecutor, Protocol):
    """An executor that draws tokens itself in passes over drafts too."""

    @property
    def draws(self) -> bool:
        """As `DrawingExecutor.draws`."""

    def check_draft_drawn(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache_lengths: NDArray[np.int64],
        rules: Iterable[Sequence[DrawRules | None]],
    ) -> DrawnDraft:  # fmt: skip
        """Like `check_draft`, but draw by rules, one for each of the first tokens of each row: [rows][tokens].

        After a token without a rule comes NO_DRAW.
        """


@runtime_checkable
class SlicingExecutor(Executor, Protocol):
    """An executor whose prefill can wait between slices, so that steps of other rows run meanwhile."""

    def prepare_slices(self) -> None:
        """Load and measure what slices need, so that the first prompt does not wait for it."""

    def prefill_in_slices(
        self, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64], limit: float
    ) -> Generator[float, None, Prefilled]:
        """Run the prompt `input_ids` [1,S] of `prompt_lengths` [1], one slice per `next`; return what `prefill` gives.

        Yields the share of the slices that have run, 0..1. A slice takes at most `limit` seconds if the executor can
        cut so finely. Closing the generator ends the prefill.
        """


def prefill_in_slices(
    executor: Executor, input_ids: NDArray[np.int64], prompt_lengths: NDArray[np.int64], limit: float
) -> Generator[float, None, Prefilled]:
    """Like `SlicingExecutor.prefill_in_slices`, for any executor: one that cannot cut runs a single slice."""
    if isinstance(executor, SlicingExecutor):
        return (yield from executor.prefill_in_slices(input_ids, prompt_lengths, limit))
    return executor.prefill(input_ids, prompt_lengths)


def threads_for(model: ModelConfig) -> int | None:
    """Return the number of threads for an executor of `model`: one for a small model, None (all cores) otherwise."""
    return 1 if count_parameters(model) < SMALL_MODEL else None
