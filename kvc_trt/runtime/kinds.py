"""The kinds of values in a request, and their conversion: each value is checked and gets one plain Python type."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.grammar.grammar import Grammar

MOST_LISTED = 8192
"""The most characters in all texts of a list together, and the most token ids in a list. A row searches such lists at
every token, while all other rows wait."""
_MOST_TOKEN_ID = (1 << 32) - 1


class Kind(Enum):
    """The type of a value; the member's value is its name in errors."""

    TEXT = "a text"
    TEXTS = "texts"
    TOKENS = "a list of token ids"
    INTEGER = "an integer"
    LARGE_INTEGER = "an integer from 0 to 2^64 - 1"
    NUMBER = "a number"
    SWITCH = "true or false"
    GRAMMAR = "a grammar"
    BIASES = "numbers by token id"

    def plain(self, value: object, what: str) -> Any:
        """Return the value as str, int, float, bool, a tuple of str or int, a `Grammar`, or a dict of int to float.

        Numbers of Python and NumPy are accepted if the conversion is exact; true and false do not count as numbers. A
        single text counts as a list of one. Raises InputError, beginning with `what`, for everything else.
        """
        return _PLAIN[self](value, what)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise _unexpected(value, what, Kind.TEXT.value)
    text = str.__str__(value)  # a plain str even if the value is of a subclass
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is not valid Unicode: character {error.start} is half of one") from error
    return text


def _texts(value: object, what: str) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        raise _unexpected(value, what, Kind.TEXTS.value)
    for one in values:
        if not isinstance(one, str):
            raise _unexpected(one, what, Kind.TEXTS.value)
    texts = tuple(_text(one, what) for one in values)
    characters = sum(max(1, len(one)) for one in texts)
    if characters > MOST_LISTED:
        raise InputError(f"{what} has {characters} characters in all, expected at most {MOST_LISTED}")
    return texts


def _tokens(value: object, what: str) -> tuple[int, ...]:
    return tuple(_token(one, what) for one in tokens_in(value, MOST_LISTED, what))


def _token(value: object, what: str) -> int:
    if not is_integer(value) or not 0 <= operator.index(value) <= _MOST_TOKEN_ID:  # type: ignore[arg-type]  # it is one
        raise _unexpected(value, what, "a token id")
    return operator.index(value)  # type: ignore[arg-type]


def _integer(value: object, what: str) -> int:
    if not is_integer(value):
        raise _unexpected(value, what, Kind.INTEGER.value)
    found = operator.index(value)  # type: ignore[arg-type]  # it is one
    if not -(1 << 63) <= found < 1 << 63:
        raise _unexpected(value, what, "an integer of at most 64 bits")
    return found


def _large_integer(value: object, what: str) -> int:
    if not is_integer(value) or not 0 <= operator.index(value) < 1 << 64:  # type: ignore[arg-type]
        raise _unexpected(value, what, Kind.LARGE_INTEGER.value)
    return operator.index(value)  # type: ignore[arg-type]


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _unexpected(value, what, Kind.NUMBER.value)
    try:
        found = float(value)
    except OverflowError as error:
        raise _unexpected(value, what, Kind.NUMBER.value) from error
    if not math.isfinite(found):
        raise _unexpected(value, what, "a finite number")
    if found != value:
        raise _unexpected(value, what, "a number of double precision")
    return found


def _switch(value: object, what: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise _unexpected(value, what, Kind.SWITCH.value)
    return bool(value)


def _grammar(value: object, what: str) -> Grammar:
    if not isinstance(value, Grammar):
        raise _unexpected(value, what, Kind.GRAMMAR.value)
    return value


def _biases(value: object, what: str) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _unexpected(value, what, Kind.BIASES.value)
    if len(value) > MOST_LISTED:
        raise InputError(f"{what} has {len(value)} tokens, expected at most {MOST_LISTED}")
    return {_token(token, what): _number(bias, f"{what} of token {token}") for token, bias in value.items()}


_PLAIN: Mapping[Kind, Callable[[object, str], Any]] = {
    Kind.TEXT: _text,
    Kind.TEXTS: _texts,
    Kind.TOKENS: _tokens,
    Kind.INTEGER: _integer,
    Kind.LARGE_INTEGER: _large_integer,
    Kind.NUMBER: _number,
    Kind.SWITCH: _switch,
    Kind.GRAMMAR: _grammar,
    Kind.BIASES: _biases,
}


def is_integer(value: object) -> bool:
    """Return whether a value is an integer of Python or NumPy; true and false do not count as integers."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def listed(value: object) -> int | None:
    """Return the length of a list, a tuple, another sequence or a NumPy vector; None for anything else.

    Strings and bytes do not count as lists.
    """
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim == 1 else None
    if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Sequence):
        return None
    return len(value)


def tokens_in(value: object, most: int, what: str) -> list[Any]:
    """Return the unchecked items of a list or an iterator of token ids.

    InputError, beginning with `what`, for more than `most` items or for anything that is not a list.
    """
    count = listed(value)
    if count is None and not isinstance(value, Iterator):
        raise _unexpected(value, what, Kind.TOKENS.value)
    if count is not None and count > most:
        raise InputError(f"{what} has {count} tokens, expected at most {most}")
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    assert isinstance(value, Iterable)
    found = list(islice(value, most + 1))
    if len(found) > most:
        raise InputError(f"{what} has more than {most} tokens")
    return found


def _unexpected(value: object, what: str, expected: str) -> InputError:
    return InputError(f"{what} is {describe(value)}, expected {expected}")
