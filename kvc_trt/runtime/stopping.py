"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through until a stop string is complete, holding back what may still become part of one.

    The match that is complete first wins (of two that end together the longer), so the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string was found); the stop string itself is never shown."""
        buffer = self._held + text
        matches = [(start + len(stop), start) for stop in self._strings if (start := buffer.find(stop)) >= 0]
        if matches:
            self._held = ""
            return buffer[: min(matches)[1]], True
        keep = max((_overlap(buffer, stop) for stop in self._strings), default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """The text held back, at the end of a row that no stop string ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
