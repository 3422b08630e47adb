"""Stored contexts that prompts may start from; the least recently used are dropped first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from kvc_trt.errors import InputError
from kvc_trt.runtime.context import NO_TOKENS, Context, extended_digest
from kvc_trt.sizes import readable_size


class PrefixTable:
    """Contexts by the digest of their text, in at most `max_bytes` bytes. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0, found {max_bytes}")
        self.max_bytes = max_bytes
        self.nbytes = 0
        """The size of all stored contexts in bytes."""
        self._contexts: OrderedDict[str, Context] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        """The number of stored texts of each length in tokens."""

    def __len__(self) -> int:
        return len(self._contexts)

    def add(self, context: Context) -> None:
        """Store a context, replacing one of the same text; the least recently used are dropped to make room.

        InputError for a context that is larger than the whole table.
        """
        if not self.fits(context.nbytes):
            raise InputError(
                f"a context of {readable_size(context.nbytes)} does not fit in {readable_size(self.max_bytes)}, "
                "the bytes for shared prefixes",
                hint="open the engine with more prefix_bytes",
            )
        if context.token_digest in self._contexts:
            self._remove(context.token_digest)
        while self.nbytes + context.nbytes > self.max_bytes:
            self._remove(next(iter(self._contexts)))
        self._contexts[context.token_digest] = context
        self._lengths[context.logical_length] += 1
        self.nbytes += context.nbytes

    def fits(self, nbytes: int) -> bool:
        """Return whether a context of that size can be stored at all."""
        return nbytes <= self.max_bytes

    def longest(self, token_ids: Sequence[int]) -> Context | None:
        """Return the context of the longest stored text with which these tokens begin, and mark it as just used."""
        digest, read, found = NO_TOKENS, 0, None
        for length in sorted(length for length in self._lengths if length <= len(token_ids)):
            digest, read = extended_digest(digest, token_ids[read:length]), length
            found = self._contexts.get(digest, found)
        if found is not None:
            self._contexts.move_to_end(found.token_digest)
        return found

    def clear(self) -> None:
        """Drop every context."""
        self._contexts.clear()
        self._lengths.clear()
        self.nbytes = 0

    def _remove(self, digest: str) -> None:
        context = self._contexts.pop(digest)
        self.nbytes -= context.nbytes
        self._lengths[context.logical_length] -= 1
        self._lengths += Counter()  # drops lengths whose count is now 0
