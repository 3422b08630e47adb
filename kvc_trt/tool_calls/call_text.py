"""One call as models write it: a JSON object with a name and arguments, read character by character."""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet

from kvc_trt.tool_calls.json_text import SPACE, JsonText

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")
"""Fields that some models write besides; they are dropped."""


class CallText:
    """A call from its brace on. `push` it its characters, and take the arguments from `new_arguments`."""

    def __init__(self, names: AbstractSet[str]) -> None:
        """Begin; `names` are those that a call may have."""
        self._names = names
        self.name: str | None = None
        self.is_whole = False
        """True once its last brace has come."""
        self._state = "start"
        self._seen: set[str] = set()
        """Fields that it has: name, arguments and so on."""
        self._field = ""
        self._value = JsonText()
        """The name of a field, or its value."""
        self._text: list[str] = []
        """The characters of this value, unless they are arguments."""
        self._arguments: list[str] = []
        """Characters of the arguments that were not taken yet."""
        self._has_arguments = False

    @property
    def has_begun(self) -> bool:
        """True once it is certain to be a call: its name is known, and its arguments have begun."""
        return self.name is not None and self._has_arguments

    def new_arguments(self) -> str:
        """Return the text of the arguments that has arrived since the last call; nothing before `has_begun`."""
        if not self.has_begun:
            return ""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def push(self, character: str) -> bool:
        """Take one more character; False if no call continues so."""
        if self._state in ("field", "value", "arguments"):
            if self._value.push(character):
                (self._arguments if self._state == "arguments" else self._text).append(character)
                return not self._value.is_closed or self._took()
            if not (self._value.is_whole and self._took()):  # only the next character ends null
                return False
        if character in SPACE:
            return self._state != "start"
        return self._structure(character)

    def _structure(self, character: str) -> bool:
        """A character outside of names and values, or the first of one."""
        state = self._state
        if state == "start" and character == "{":
            self._state = "first field"
        elif state in ("first field", "next field") and character == '"':
            return self._begin("field", character)
        elif state == "colon" and character == ":":
            self._state = "before value"
        elif state == "before value" and character == "{" and self._field in _ARGUMENTS:
            self._has_arguments = True
            return self._begin("arguments", character)
        elif state == "before value" and character in ('"n' if self._field in _ARGUMENTS else '"'):
            return self._begin("value", character)
        elif state == "after" and character == ",":
            self._state = "next field"
        elif state == "after" and character == "}":
            self._state, self.is_whole = "end", True
            if not self._has_arguments:
                self._give("{}")
            return self.name is not None
        else:
            return False
        return True

    def _begin(self, state: str, character: str) -> bool:
        self._state, self._value = state, JsonText()
        (self._arguments if state == "arguments" else self._text).append(character)
        return self._value.push(character)

    def _took(self) -> bool:
        """Make use of a field's name or value that is whole; False for one that no call has."""
        state, found = self._state, json.loads("".join(self._text) or "null")
        self._text.clear()
        if state == "field":
            kind = "arguments" if found in _ARGUMENTS else found
            if kind in self._seen or (found not in ("name", *_ARGUMENTS, *_OTHERS)):
                return False
            self._seen.add(kind)
            self._state, self._field = "colon", found
            return True
        self._state = "after"
        if state == "value" and self._field == "name":
            self.name = found
            return found in self._names
        if state == "value" and self._field in _ARGUMENTS and found is not None:
            return self._took_text(found)
        return True

    def _took_text(self, text: str) -> bool:
        """Take arguments that are JSON within a text, as some models write them."""
        value = JsonText()
        self._give(text)
        return text.startswith("{") and all(map(value.push, text)) and value.is_closed

    def _give(self, arguments: str) -> None:
        self._arguments.append(arguments)
        self._has_arguments = True
