"""Decode tokens to text one at a time, and find stop strings in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_TRY_TO_CUT = 16
"""The number of pending tokens from which `Detokeniser` looks for a place to cut; only broken text gets this far."""
_CUT_ANYWAY = 64
"""The number of pending tokens that are shown even if there is no place to cut."""


class Detokeniser:
    """Turns one row's tokens into pieces of text whose concatenation equals decoding all tokens at once.

    A token's text depends on its neighbours (spaces, characters that span several tokens), so each new token is decoded
    together with the piece before it and shown once the text no longer ends in a broken character. Only these few
    tokens are decoded again, so the work per token does not grow with the text. A tokenizer with byte fallback may turn
    a whole run of bytes into replacement characters because one is wrong; characters already shown stay as they are.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the new text after this token: empty while a character is incomplete, and for special tokens."""
        if token_id in self._special or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        text = self._new_text()
        if text and not text.endswith(REPLACEMENT):
            return self._accept(text)
        return self._cut_broken_text() if len(self._pending) >= _TRY_TO_CUT else ""

    def flush(self) -> str:
        """Return the text held back, at the end of a row."""
        return self._accept(self._new_text()) if self._pending else ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _new_text(self) -> str:
        before = self._decode(self._context)
        whole = self._decode(self._context + self._pending)
        # Byte fallback can change the text of the context when a wrong byte follows it.
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _accept(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text

    def _cut_broken_text(self) -> str:
        """Limit the pending tokens: accept those up to a token boundary that does not cut a character.

        A character has at most four bytes, so in text made of byte tokens one of any four boundaries qualifies.
        """
        whole = self._decode(self._pending)
        for end in range(len(self._pending) - 1, len(self._pending) - 5, -1):
            head, tail = self._pending[:end], self._pending[end:]
            if self._decode(head) + self._decode(tail) == whole:
                self._pending = head
                text = self._accept(self._new_text())
                self._pending = tail
                return text
        return self.flush() if len(self._pending) >= _CUT_ANYWAY else ""


class StopStrings:
    """Passes text on until a stop string is complete, holding back an end that may still become part of one.

    The match that ends first wins (the longer of two that end together), so the result does not depend on how the
    text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown now, without any stop string, and whether a stop string was found."""
        buffer = self._held + text
        matches = [(start + len(stop), start) for stop in self._strings if (start := buffer.find(stop)) >= 0]
        if matches:
            self._held = ""
            return buffer[: min(matches)[1]], True
        keep = max((_overlap(buffer, stop) for stop in self._strings), default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """Return the text held back, at the end of a row that no stop string ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
