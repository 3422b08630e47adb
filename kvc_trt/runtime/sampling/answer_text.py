"""An answer while it is generated: its tokens, their text, and the rules that end it."""

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
    """The rules that end an answer before it reaches its largest length."""

    token_ids: frozenset[int]
    strings: Sequence[str]
    min_tokens: int
    """The number of tokens that an answer has before these rules apply."""


class AnswerText:
    """Collects the tokens of one answer and their text; without a tokenizer there is no text."""

    def __init__(self, tokenizer: Tokenizer | None, ends: Ends) -> None:
        self._ends = ends
        self._detokeniser = None if tokenizer is None else Detokeniser(tokenizer)
        self._stop_strings = StopStrings(ends.strings)
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        """Log-probabilities of each token; empty if the request did not ask for them."""

    @property
    def text(self) -> str | None:
        """The text so far, without an end that later tokens may still change; None without a tokenizer."""
        return None if self._detokeniser is None else "".join(self._pieces)

    def push(
        self, token: int, logprobs: TokenLogprobs | None, no_room: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Add a token; return the text that this makes final, and why the answer ends with it (None if it goes on).

        `no_room` is the reason if no token can follow this one, such as a length limit; otherwise None.
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
        """End the answer here, and add the text that was held back."""
        self._pieces.append(self._finish()[0])

    @property
    def _may_not_stop(self) -> bool:
        """True if the latest token is among the first `min_tokens`, at which no stop string ends the answer."""
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
