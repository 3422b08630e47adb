"""Read a turn of one row: many new tokens at once, after everything that the row has seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.runtime.answer_rules import RULES
from kvc_trt.runtime.executor import Executor, Extended, Limits, TurnExecutor
from kvc_trt.runtime.kinds import listed
from kvc_trt.runtime.request import check_token_ids
from kvc_trt.runtime.session.row import Row


class Taken(NamedTuple):
    """The number of tokens that a turn has read, and the logits after the new ones."""

    tokens: int
    """The number of tokens read: the new ones, and earlier ones that had not been fed."""
    logits: NDArray[np.float32] | None
    """[new tokens, vocab]: the logits after each new token; None if the engine only returns the last ones."""


def take_turn(
    executor: Executor,
    row: Row,
    place: int,
    token_ids: Iterable[int],
    max_new_tokens: int | None = None,
    *,
    feed_last: bool = True,
) -> Taken:
    """Let `row`, which is at `place` of the buffers, take a turn, and begin a new answer.

    Tokens that the row has sampled or queued but not fed go first; without `feed_last`, the sampled one is left out.
    InputError if the turn is empty or does not fit, or if the engine takes no turns; nothing has changed then.
    """
    what, limits = row.label, executor.limits
    check_takes_turns(executor, what)
    row.check_no_proof()
    assert isinstance(executor, TurnExecutor)
    waiting = row.unfed() if feed_last else row.forced
    if count := listed(token_ids):  # checked first, because this error has the numbers and a remedy
        check_turn(len(waiting) + count, row.position, row.cache_lengths.tolist(), limits, what)
    new = check_token_ids(token_ids, limits, what)
    if not new:
        raise InputError(f"{what}: the turn is empty, expected at least one token")
    RULES["max_new_tokens"].check(max_new_tokens, f"{what}: ")
    tokens = [*waiting, *new]
    check_turn(len(tokens), row.position, row.cache_lengths.tolist(), limits, what)
    found = _run(executor, row, place, tokens)
    row.take_turn(tokens, new, found.logits[0], found.cache_lengths[:, 0].copy(), max_new_tokens)
    return Taken(len(tokens), None if found.all_logits is None else found.all_logits[0, -len(new) :])


def read_rest(executor: Executor, row: Row, place: int, tokens: list[int]) -> None:
    """Read the rest of a prompt that begins with a stored context, as a turn of the row at `place`.

    It must fit (`check_turn`), and the executor must take turns (`takes_turns`).
    """
    assert isinstance(executor, TurnExecutor)
    found = _run(executor, row, place, tokens)
    row.read(tokens, found.logits[0], found.cache_lengths[:, 0].copy())


def check_takes_turns(executor: Executor, what: str) -> None:
    """Raise InputError, beginning with `what` and with a hint how to get turns, if an executor takes none."""
    if executor.limits.no_turns is not None:
        raise InputError(f"{what}: {executor.limits.no_turns.reason}", hint=executor.limits.no_turns.hint)
    if not isinstance(executor, TurnExecutor):
        raise InputError(f"{what}: this executor takes no turns", hint="run the engine with another --backend")


def check_gives_all_logits(executor: Executor, what: str) -> None:
    """Raise InputError, beginning with `what`, unless turns return the logits after each of their tokens."""
    check_takes_turns(executor, what)
    if not executor.limits.all_logits:
        raise InputError(
            f"{what}: the engine returns logits only after the last token of a turn",
            hint="kvc-trt build --config ENGINE_DIR/config.json --all-logits -o ENGINE_DIR --force",
        )


def takes_turns(executor: Executor) -> bool:
    """Return whether rows of this executor take turns."""
    return executor.limits.no_turns is None and isinstance(executor, TurnExecutor)


def load_turns(executor: Executor) -> None:
    """Load the parts of the engine that turns need, if rows of this executor take turns."""
    if executor.limits.no_turns is None and isinstance(executor, TurnExecutor):
        executor.load_turns()


def room_after_turn(count: int, position: int, cache_lengths: Sequence[int], limits: Limits) -> int:
    """Return the number of tokens that a row can still take after a turn of `count` tokens that fits.

    A cache that compacts after a turn has room for an answer again.
    """
    keeping = limits.keeping or (True,) * len(limits.capacities)
    free = (
        slots - stored - count if keeps else limits.max_output_len
        for slots, stored, keeps in zip(limits.capacities, cache_lengths, keeping, strict=True)
    )
    return min([limits.max_sequence_len - position - count, *free])


def _run(executor: TurnExecutor, row: Row, place: int, tokens: list[int]) -> Extended:
    return executor.extend(
        place,
        np.array([tokens], np.int64),
        np.array([len(tokens)], np.int64),
        np.array([row.position], np.int64),
        row.cache_lengths[:, None],
    )


def check_turn(count: int, position: int, cache_lengths: Sequence[int], limits: Limits, what: str) -> None:
    """Raise InputError unless a turn of `count` tokens fits a row at `position` whose caches have these lengths."""
    after = position + count
    if after > limits.max_sequence_len:
        raise InputError(
            f"{what}: a turn of {count} tokens after {position} ends at position {after}, "
            f"expected at most {limits.max_sequence_len}",
            hint=f"build the engine with --max-conversation-len {after} or more",
        )
    if count > limits.max_input_len:
        raise InputError(
            f"{what}: a turn of {count} tokens, expected at most {limits.max_input_len} (the engine's max_input_len)",
            hint=limits.way_out(count, "take it in parts"),
        )
    keeping = limits.keeping or (True,) * len(limits.capacities)
    for cache, (slots, keeps) in enumerate(zip(limits.capacities, keeping, strict=True)):
        stored = cache_lengths[cache]
        if keeps and stored + count > slots:
            raise InputError(
                f"{what}: a turn of {count} tokens does not fit: cache {cache} keeps every token, "
                f"holds {stored} and has {slots} slots",
                hint="build the engine with a larger --max-conversation-len, or with a policy that evicts",
            )
