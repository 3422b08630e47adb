"""What a session does with contexts: makes them of rows, starts rows from them, and shares those of common prefixes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from kvc_trt.errors import InputError
from kvc_trt.runtime.context import Array, Context, Packing
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.request import Checked
from kvc_trt.runtime.session.prefixes import PrefixTable
from kvc_trt.runtime.session.row import Row, Start
from kvc_trt.runtime.session.turn import check_turn, room_after_turn


class ContextStore:
    """The packing of a session's engine, and `prefix_bytes` of contexts that prompts have in common.

    What follows a context is read as a turn if rows take `turns`, otherwise one decode step per token.
    """

    def __init__(self, packing: Packing | None, prefix_bytes: int, limits: Limits, *, turns: bool) -> None:
        self.prefixes = PrefixTable(prefix_bytes)
        self._packing = packing
        self._limits = limits
        self._turns = turns

    @property
    def packing(self) -> Packing:
        """The engine's packing; ValueError for a session that was opened without."""
        if self._packing is None:
            raise ValueError("this session was opened without a packing, which contexts need")
        return self._packing

    @property
    def stores_prompts(self) -> bool:
        """Whether every prompt is shared: there are bytes for it, and whatever follows a prompt loses nothing."""
        if self.prefixes.max_bytes == 0 or self._packing is None:
            return False
        return self._packing.keeps_every_token and (self._turns or self._packing.reads_everything)

    def check(self, context: Context, what: str) -> None:
        """Raise InputError, naming `what`, for a context of another engine."""
        context.fingerprint.check_same(self.packing.fingerprint, what, self.packing.other_turns)

    def share(self, context: Context) -> None:
        """Store a context for prompts that begin with its text; InputError for another engine's, or one too large."""
        self.check(context, "the context")
        self.prefixes.add(context)

    def share_prompt(self, row: Row, state: Callable[[], Mapping[str, Array]]) -> None:
        """Store the prompt that a row has just read, if prompts are stored and it fits the table.

        `state` reads the row's tensors. Where memory for a copy is missing, nothing is stored: the row needs none.
        """
        if not self.stores_prompts:
            return
        lengths = tuple(row.cache_lengths.tolist())
        if self.prefixes.fits(self.packing.nbytes(lengths, row.position)):
            with contextlib.suppress(MemoryError):
                self.prefixes.add(self.of_row(row, state()))

    def start_of(self, own: Context | None, checked: Checked, what: str) -> Start:
        """Return what a request starts from: its own context, or the longest shared text that its prompt begins with.

        A shared one is left aside where the rest and the answer would not fit after it: no answer is cut short by it.
        InputError, naming `what`, for a prompt or continuation that does not fit after the request's own context.
        """
        if own is not None:
            return self.start_after(own, checked, what)
        found = self.prefixes.longest(checked.prompt)
        if found is None:
            return Start()
        rest = checked.prompt[found.logical_length :]
        start = Start(found, rest, at_once=self._turns and bool(rest))
        needed = len(checked.continuation) + checked.max_new_tokens - 1
        return start if needed <= self._room_after(start) else Start()

    def start_after(self, context: Context, checked: Checked, what: str) -> Start:
        """Return the start of a prompt that goes on after `context`; InputError, naming `what`, if it does not fit."""
        start = Start(context, checked.prompt, at_once=self._turns and bool(checked.prompt))
        if start.at_once:
            check_turn(len(checked.prompt), context.logical_length, context.cache_lengths, self._limits, what)
        self._check_room(start, len(checked.continuation), what)
        return start

    def of_row(self, row: Row, state: Mapping[str, Array]) -> Context:
        """Return a copy of everything that a row has fed, given its state tensors by name.

        ValueError for a row whose logits stay on the device.
        """
        if isinstance(row.answer, int):
            raise ValueError(
                f"row {row.identity} has only its best token on the host; expected a request with keep_logits"
            )
        lengths = tuple(row.cache_lengths.tolist())
        return Context(
            fingerprint=self.packing.fingerprint,
            logical_length=row.position,
            cache_lengths=lengths,
            token_digest=row.token_digest(),
            logits=row.answer.copy(),
            tensors=self.packing.pack(state, lengths, row.position),
        )

    def _room_after(self, start: Start) -> int:
        """Return how many tokens still fit after the context and its unread tokens; negative if those do not."""
        assert start.context is not None
        position, lengths, count = start.context.logical_length, start.context.cache_lengths, len(start.unread)
        if start.at_once:
            return room_after_turn(count, position, lengths, self._limits)
        return self._limits.room(position, lengths) - count

    def _check_room(self, start: Start, continuation: int, what: str) -> None:
        assert start.context is not None
        room = self._room_after(start)
        if continuation > room:
            unread, before = len(start.unread), start.context.logical_length
            positions_end = before + unread + continuation > self._limits.max_sequence_len
            larger = "--max-conversation-len" if positions_end else "--max-output-len"
            raise InputError(
                f"{what}: {unread + continuation} tokens do not fit after {before} tokens, "
                f"found room for {room + unread}",
                hint=f"build the engine with a larger {larger}",
            )
