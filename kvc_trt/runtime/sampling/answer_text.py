"""The tokens of an answer that is being given, their text, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.runtime.logprobs import TokenLogprobs
from kvc_trt.runtime.request import FinishReason
from kvc_trt.runtime.sampling.text import Detokeniser, StopStrings

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer


@dataclass(frozen=True)
class Ends:
    """The rules that end an answer before its room does."""

    token_ids: frozenset[int]
    strings: Sequence[str]
    min_tokens: int
    """So many tokens come before any of these counts."""


class AnswerText:
    """One answer, token by token; without a tokenizer it has no text."""

    def __init__(self, tokenizer: Tokenizer | None, ends: Ends) -> None:
        self._ends = ends
        self._detokeniser = None if tokenizer is None else Detokeniser(tokenizer)
        self._stop_strings = StopStrings(ends.strings)
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        """One for each token, if they are wanted."""

    @property
    def text(self) -> str | None:
        """The text that is certain."""
        return None if self._detokeniser is None else "".join(self._pieces)

    def push(
        self, token: int, logprobs: TokenLogprobs | None, no_room: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Add a token; return the text that is certain with it, and the reason if the answer ends here.

        `no_room` is the reason for which no token can follow this one, if there is one.
        """
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        text, reason = self._take(token)
        if reason is None and no_room is not None:
            tail, stopped = self._finish()
            text, reason = text + tail, "stop" if stopped else no_room
        self._pieces.append(text)
        return text, reason

    def cut(self) -> None:
        """End the answer here: text that was held back is certain now."""
        self._pieces.append(self._finish()[0])

    @property
    def _may_not_stop(self) -> bool:
        """True if the latest token is one of those that come before anything may end the answer."""
        return len(self.token_ids) <= self._ends.min_tokens

    def _take(self, token: int) -> tuple[str, FinishReason | None]:
        if token in self._ends.token_ids:
            return self._finish()[0], "stop"
        if self._detokeniser is None:
            return "", None
        text = self._detokeniser.push(token)
        if self._may_not_stop:
            return text, None
        text, stopped = self._stop_strings.push(text)
        return text, "stop" if stopped else None

    def _finish(self) -> tuple[str, bool]:
        """Return the text that was held back, and whether it ends with a stop string."""
        if self._detokeniser is None:
            return "", False
        if self._may_not_stop:
            return self._detokeniser.flush(), False
        text, stopped = self._stop_strings.push(self._detokeniser.flush())
        return (text, True) if stopped else (text + self._stop_strings.flush(), False)
