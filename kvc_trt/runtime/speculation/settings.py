"""The option `speculate`: how drafts are made."""

from __future__ import annotations

from dataclasses import dataclass

from kvc_trt.errors import InputError

NGRAM = "ngram"


@dataclass(frozen=True)
class Speculation:
    """Drafts of `tokens` tokens from the row's own text; None takes as many as the engine checks at once."""

    tokens: int | None = None

    @staticmethod
    def parse(text: str) -> Speculation:
        """Read "ngram" or "ngram:4"; InputError for anything else."""
        kind, colon, number = text.partition(":")
        if kind != NGRAM or (colon and not number.isdecimal()):
            raise InputError(f"speculate is {text!r}, expected {NGRAM} or {NGRAM}:TOKENS, as {NGRAM}:4")
        return Speculation(int(number) if colon else None)
