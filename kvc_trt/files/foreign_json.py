"""JSON that a stranger sends, read so that no other thread waits for long.

Python's reader lets no other thread run until it is done. Of 16 MiB that are nothing but brackets it takes two seconds,
in which a server would draw no token.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from kvc_trt.errors import InputError

MOST_VALUES = 1 << 18
"""Objects, lists and texts, names included, that one text may hold; numbers are as many as there is room for."""
_SHORT = 1 << 16
"""Characters that are read, or looked through, in one go."""


def foreign_json(text: str) -> Any:
    """Parse a JSON text that comes from outside.

    ValueError or RecursionError for what is not JSON, NaN and Infinity included; InputError for more values than
    `MOST_VALUES`.
    """
    if len(text) <= _SHORT:
        return json.loads(text, parse_constant=_no_number)
    if _holds_more(text, MOST_VALUES):
        raise InputError(f"it holds more than {MOST_VALUES} objects, lists and texts")
    # Functions of Python's own let other threads run between two numbers.
    return json.loads(text, parse_constant=_no_number, parse_int=_integer, parse_float=_float)


def _holds_more(text: str, most: int) -> bool:
    """Return whether a text has more than `most` brackets that open, and pairs of quotes."""
    start, count, quotes = 0, 0, 0
    while start < len(text) and count + quotes // 2 <= most:
        end = start + _SHORT
        piece = text[start:end]
        if end < len(text) and (len(piece) - len(piece.rstrip("\\"))) % 2:  # the next character is escaped
            end -= 1
            piece = piece[:-1]
        parts = piece.replace("\\\\", "").replace('\\"', "").split('"')
        outside = "".join(parts[quotes % 2 :: 2])
        count += outside.count("[") + outside.count("{")
        quotes += len(parts) - 1
        start = end
    return count + quotes // 2 > most


def _integer(text: str) -> int:
    return int(text)


def _float(text: str) -> float:
    return float(text)


def _no_number(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(text)
