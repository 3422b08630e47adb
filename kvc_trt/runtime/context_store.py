"""What a session does with contexts: makes them of rows, starts rows from them, and shares those of common prefixes."""

from __future__ import annotations

from collections.abc import Mapping

from kvc_trt.runtime.context import Array, Context, Packing
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.prefixes import PrefixTable
from kvc_trt.runtime.request import Request
from kvc_trt.runtime.row import Row, Start


class ContextStore:
    """The packing of a session's engine, and `prefix_bytes` of contexts that prompts have in common."""

    def __init__(self, packing: Packing | None, prefix_bytes: int) -> None:
        self.prefixes = PrefixTable(prefix_bytes)
        self._packing = packing

    @property
    def packing(self) -> Packing:
        """The engine's packing; ValueError for a session that was opened without."""
        if self._packing is None:
            raise ValueError("this session was opened without a packing, which contexts need")
        return self._packing

    @property
    def stores_prompts(self) -> bool:
        """Whether every prompt is shared: there are bytes for it, and whatever follows a prompt loses nothing."""
        return self.prefixes.max_bytes > 0 and self._packing is not None and self._packing.loses_nothing

    def check(self, context: Context, what: str) -> None:
        """Raise InputError, naming `what`, for a context of another engine."""
        context.fingerprint.check_same(self.packing.fingerprint, what)

    def share(self, context: Context) -> None:
        """Store a context for prompts that begin with its text; InputError for another engine's, or one too large."""
        self.check(context, "the context")
        self.prefixes.add(context)

    def share_prompt(self, row: Row, state: Mapping[str, Array]) -> None:
        """Store the prompt that a row has just read, unless it is larger than the table."""
        context = self.of_row(row, state)
        if self.prefixes.fits(context.nbytes):
            self.prefixes.add(context)

    def start_of(
        self, request: Request, prompt: list[int], continuation: list[int], max_new_tokens: int, limits: Limits
    ) -> Start:
        """Return what a request starts from: its own context, or the longest shared text that its prompt begins with.

        A shared one is left aside where the rest and the answer would not fit after it: no answer is cut short by it.
        """
        if request.context is not None:
            return Start(request.context, prompt)
        found = self.prefixes.longest(prompt)
        if found is None:
            return Start()
        rest = prompt[found.logical_length :]
        needed = len(rest) + len(continuation) + max_new_tokens - 1
        if needed > limits.room(found.logical_length, found.cache_lengths):
            return Start()
        return Start(found, rest)

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
            tensors=self.packing.pack(state, lengths),
        )
