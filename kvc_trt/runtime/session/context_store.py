"""The contexts of a session: they are made of rows, other rows start from them, and prompts may share them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.context import Array, Context, Packing
from kvc_trt.runtime.executor import Drawn, Limits
from kvc_trt.runtime.session.admitted import Admitted
from kvc_trt.runtime.session.prefixes import PrefixTable
from kvc_trt.runtime.session.row import Row
from kvc_trt.runtime.session.turn import check_turn, room_after_turn


class ContextStore:
    """Makes contexts with an engine's packing, and keeps at most `prefix_bytes` bytes of contexts for prompts to share.

    Tokens after a context are read as a turn if rows take `turns`, otherwise with one decode step per token.
    """

    def __init__(self, packing: Packing | None, prefix_bytes: int, limits: Limits, *, turns: bool) -> None:
        self.prefixes = PrefixTable(prefix_bytes)
        self._packing = packing
        self._limits = limits
        self._turns = turns

    @property
    def packing(self) -> Packing:
        """The engine's packing; ValueError for a session that was opened without one."""
        if self._packing is None:
            raise ValueError("this session was opened without a packing, which contexts need")
        return self._packing

    @property
    def stores_prompts(self) -> bool:
        """True if the store keeps every prompt for others: it has bytes for them, and sharing loses no tokens."""
        if self.prefixes.max_bytes == 0 or self._packing is None:
            return False
        return self._packing.keeps_every_token and (self._turns or self._packing.reads_everything)

    def check(self, context: Context, what: str) -> None:
        """Raise InputError, beginning with `what`, for another engine's context, or for wrong lengths or logits."""
        if not isinstance(context, Context):
            raise InputError(f"{what} is {describe(context)}, expected a Context")
        context.fingerprint.check_same(self.packing.fingerprint, what, self.packing.other_turns)
        self._limits.check_lengths(context.logical_length, context.cache_lengths, what)
        if context.logits.shape != (self._limits.vocab_size,):
            raise InputError(
                f"{what} has logits of shape {list(context.logits.shape)}, expected [{self._limits.vocab_size}]"
            )

    def share(self, context: Context) -> None:
        """Store a context for prompts that begin with its text; InputError if it is too large or another engine's."""
        self.check(context, "the context")
        self.prefixes.add(context)

    def share_prompt(self, row: Row, state: Callable[[], Mapping[str, Array]]) -> None:
        """Store the prompt that a row has just read, if prompts are stored and it fits the table.

        `state` reads the row's tensors. Without memory for a copy, nothing is stored, and the row goes on.
        """
        if not self.stores_prompts:
            return
        lengths = tuple(row.cache_lengths.tolist())
        if self.prefixes.fits(self.packing.nbytes(lengths, row.position)):
            with contextlib.suppress(MemoryError):
                self.prefixes.add(self.of_row(row, state()))

    def start_after(self, context: Context, admitted: Admitted) -> None:
        """Let a request start from `context`, its own; InputError if prompt and continuation do not fit after it."""
        unread, continuation = admitted.prompt, len(admitted.continuation)
        position, at_once = context.logical_length, self._turns and bool(unread)
        if at_once:
            check_turn(len(unread), position, context.cache_lengths, self._limits, admitted.label)
        room = self._room_after(context, len(unread), at_once=at_once)
        if continuation > room:
            tokens = len(unread) + continuation
            positions_end = position + tokens > self._limits.max_sequence_len
            larger = "--max-conversation-len" if positions_end else "--max-output-len"
            raise admitted.error(
                f"{tokens} tokens do not fit after {position} tokens, found room for {room + len(unread)}",
                hint=f"build the engine with a larger {larger}",
            )
        admitted.start_from(context, unread, at_once=at_once)

    def start_shared(self, admitted: Admitted) -> None:
        """Let a request start from the longest shared text with which its prompt begins, if there is one.

        It is not used if the rest of the prompt and the longest answer would not fit after it, so that sharing cuts no
        answer short.
        """
        found = self.prefixes.longest(admitted.prompt)
        if found is None:
            return
        rest = admitted.prompt[found.logical_length :]
        at_once = self._turns and bool(rest)
        needed = len(admitted.continuation) + admitted.max_new_tokens - 1
        if needed <= self._room_after(found, len(rest), at_once=at_once):
            admitted.start_from(found, rest, at_once=at_once)

    def of_row(self, row: Row, state: Mapping[str, Array]) -> Context:
        """Return a copy of a row as a context, given its state tensors by name.

        ValueError for a row whose logits stay on the device.
        """
        if isinstance(row.answer, Drawn):
            raise ValueError(f"{row.label} has only its next token on the host; expected a request with keep_logits")
        lengths = tuple(row.cache_lengths.tolist())
        return Context(
            fingerprint=self.packing.fingerprint,
            logical_length=row.position,
            cache_lengths=lengths,
            token_digest=row.token_digest(),
            logits=row.answer.copy(),
            tensors=self.packing.pack(state, lengths, row.position),
        )

    def _room_after(self, context: Context, unread: int, *, at_once: bool) -> int:
        """Return the number of tokens that fit after a context and `unread` tokens; negative if these do not fit."""
        position, lengths = context.logical_length, context.cache_lengths
        if at_once:
            return room_after_turn(unread, position, lengths, self._limits)
        return self._limits.room(position, lengths) - unread
