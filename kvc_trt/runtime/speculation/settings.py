"""The option `speculate`: the source and the length of drafts."""

from __future__ import annotations

from dataclasses import dataclass

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.kinds import Kind

NGRAM = "ngram"
_MOST_DIGITS = 9


@dataclass(frozen=True)
class Speculation:
    """Drafts of `tokens` tokens from the row's own text; None takes the most that the engine checks in one pass."""

    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            object.__setattr__(self, "tokens", Kind.INTEGER.plain(self.tokens, "speculate: tokens"))

    @staticmethod
    def parse(text: str) -> Speculation:
        """Read "ngram" or "ngram:4"; InputError for anything else."""
        kind, colon, number = text.partition(":")
        if kind != NGRAM or (colon and not (number.isdecimal() and len(number) <= _MOST_DIGITS)):
            raise InputError(f"speculate is {describe(text)}, expected {NGRAM} or {NGRAM}:TOKENS, as {NGRAM}:4")
        return Speculation(int(number) if colon else None)
