"""JSON read character by character: whether it can still be a value, where it ends, and its value if cut short."""

from __future__ import annotations

import json
import re
from typing import Any

SPACE = " \t\n\r"
_LONGEST_NUMBER = 400
"""Characters. Each new one has the number looked through again."""
_NUMBER_BEGUN = re.compile(r"-|-?(0|[1-9]\d*)(\.\d*)?|-?(0|[1-9]\d*)(\.\d+)?[eE][+-]?\d*", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = ("true", "false", "null")
_CLOSING = {"{": "}", "[": "]"}


class JsonText:
    """One JSON value, without white space before it. `push` it its characters."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """The brackets that are open."""
        self._state = "value"
        self._key = False
        """True within a string that is a name of an object."""
        self._word = ""
        """The beginning of a number, or of true, false or null."""
        self._hexadecimal = 0
        """Digits of a \\u escape that are missing."""

    @property
    def is_whole(self) -> bool:
        """True if the text is a value; a number may go on."""
        return self._state == "end" or (self._state == "word" and not self._open and _is_word(self._word))

    @property
    def is_closed(self) -> bool:
        """True if nothing can follow."""
        return self._state == "end"

    def push(self, character: str) -> bool:
        """Take one more character; False if no value continues so."""
        if self._state == "word" and character not in "+-.0123456789Eaeflnrstu":
            if not self._open or not _is_word(self._word):
                return False
            self._state = "after"
        state = self._state
        if state == "string":
            return self._in_string(character)
        if state == "word":
            self._word += character
            return _begins_word(self._word)
        if state == "escape":
            self._state, self._hexadecimal = "hexadecimal" if character == "u" else "string", 4
            return character in '"\\/bfnrtu'
        if state == "hexadecimal":
            self._hexadecimal -= 1
            self._state = "hexadecimal" if self._hexadecimal else "string"
            return character in "0123456789abcdefABCDEF"
        if state == "end":
            return False
        return (character in SPACE and bool(self._open)) or self._structure(character)

    def _in_string(self, character: str) -> bool:
        if character == '"':
            self._state = "colon" if self._key else self._after()
            self._key = False
        elif character == "\\":
            self._state = "escape"
        return character >= " "

    def _structure(self, character: str) -> bool:
        """A character between values, or the first of one."""
        state = self._state
        if state == "colon":
            self._state = "value"
            return character == ":"
        if state == "after" and character == ",":
            self._state = "name" if self._open[-1] == "{" else "value"
            return True
        if state in ("after", "first", "first name") and character == _CLOSING[self._open[-1]]:
            self._open.pop()
            self._state = self._after()
            return True
        if state in ("name", "first name"):
            self._state, self._key = "string", True
            return character == '"'
        return state != "after" and self._begin(character)

    def _begin(self, character: str) -> bool:
        if character in _CLOSING:
            self._open.append(character)
            self._state = "first name" if character == "{" else "first"
        elif character == '"':
            self._state = "string"
        else:
            self._state, self._word = "word", character
            return _begins_word(character)
        return True

    def _after(self) -> str:
        return "after" if self._open else "end"


def begun_object(text: str) -> dict[str, Any] | None:
    """Return the readable part of a JSON object that breaks off somewhere; None if the text does not begin an object.

    A string that breaks off is kept up to its end. A number may have lost digits, so it is kept only if more text
    follows it.
    """
    text = text.lstrip(SPACE)
    value, end, in_string = JsonText(), 0, False
    for place, character in enumerate(text):
        if not value.push(character):
            break
        state = value._state
        if state in ("after", "end", "first", "first name") or (state == "string" and not value._key):
            end, in_string = place + 1, state == "string"
        elif character == "," and state in ("name", "value"):
            end, in_string = place, False
    # No bracket has been opened or closed since that place.
    closing = '"' * in_string + "".join(_CLOSING[one] for one in reversed(value._open))
    try:
        found = json.loads(text[:end] + closing)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _begins_word(text: str) -> bool:
    if text[0].isalpha():
        return any(word.startswith(text) for word in _WORDS)
    return len(text) <= _LONGEST_NUMBER and _NUMBER_BEGUN.fullmatch(text) is not None


def _is_word(text: str) -> bool:
    return text in _WORDS or _NUMBER.fullmatch(text) is not None
