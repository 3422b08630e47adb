"""Tokens that one row may not draw: those that complete a banned sequence, or would end its answer too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.kinds import MOST_LISTED, tokens_in
from kvc_trt.runtime.request import Request, check_token_ids

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer

TokenIds = tuple[int, ...]


class Banned:
    """The token sequences that one row may not write, and the end tokens that it may not write yet.

    The last token of a sequence is banned while the text (prompt, turns and answers) ends with the tokens before it, as
    in transformers; a sequence of one token is always banned. `ends` [token ids] are banned until the answer has
    `min_tokens` tokens.
    """

    def __init__(self, sequences: Sequence[TokenIds] = (), ends: Collection[int] = (), min_tokens: int = 0) -> None:
        self._always = sorted({sequence[0] for sequence in sequences if len(sequence) == 1})
        self._sequences = [sequence for sequence in sequences if len(sequence) > 1]
        self._text: deque[int] = deque(maxlen=max((len(one) - 1 for one in self._sequences), default=0))
        self._ends = sorted(ends) if min_tokens else []
        self._min_tokens = min_tokens
        self._answered = 0

    @property
    def is_active(self) -> bool:
        """True if these rules can ban a token at any time."""
        return bool(self._always or self._sequences or self._ends)

    def read(self, token_ids: Iterable[int]) -> None:
        """Record tokens that were added to the text."""
        if self._sequences:
            self._text.extend(token_ids)

    def answered(self) -> None:
        """Record that the answer has one token more."""
        self._answered += 1

    def begin_answer(self) -> None:
        """Begin another answer: its tokens are counted anew for `min_tokens`."""
        self._answered = 0

    def copy(self) -> Banned:
        """Return an independent copy of the current state."""
        other = copy(self)
        other._text = self._text.copy()
        return other

    def token_ids(self) -> list[int]:
        """Return the ids of the tokens that are banned now; an id may occur twice."""
        text = tuple(self._text)
        completed = [one[-1] for one in self._sequences if text[len(text) - len(one) + 1 :] == one[:-1]]
        return [*self._always, *completed, *(self._ends if self._answered < self._min_tokens else ())]


def banned_sequences(request: Request, tokenizer: Tokenizer | None, limits: Limits, what: str) -> list[TokenIds]:
    """Return the token sequences that a request bans; InputError, naming `what`, for those that are invalid.

    Each bad word is banned in two spellings: its tokens without and with a space before it.
    """
    if request.bad_words and tokenizer is None:
        raise InputError(
            f"{what}: bad words need a tokenizer, and this engine has none", hint="give banned_token_ids instead"
        )
    found: dict[TokenIds, None] = {}
    tokens = 0
    for position, given in enumerate(tokens_in(request.banned_token_ids, MOST_LISTED, f"{what}: banned_token_ids")):
        sequence = check_token_ids(given, limits, f"{what}: banned sequence {position}")
        if not sequence:
            raise InputError(f"{what}: banned sequence {position} is empty")
        tokens += len(sequence)
        if tokens > MOST_LISTED:
            raise InputError(f"{what}: the banned sequences have more than {MOST_LISTED} tokens in all")
        found[tuple(sequence)] = None
    for word in request.bad_words:
        assert tokenizer is not None
        if not word.strip():
            raise InputError(f"{what}: a bad word is empty")
        for text in (word, " " + word.lstrip()):
            found[tuple(tokenizer.encode(text, add_special_tokens=False).ids)] = None
    return [sequence for sequence in found if sequence]


def check_leaves_a_token(sequences: Sequence[TokenIds], ends: Collection[int], limits: Limits, what: str) -> None:
    """Raise InputError, naming `what`, if the bans together could forbid every token of the vocabulary."""
    banned = {sequence[-1] for sequence in sequences}.union(ends)
    if banned.issuperset(range(limits.vocab_size)):
        raise InputError(f"{what}: bad words and min_tokens leave none of the model's {limits.vocab_size} tokens")
