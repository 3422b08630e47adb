"""One call as Mistral's newer models write it: `name[ARGS]{...}`, read character by character."""

from __future__ import annotations

from collections.abc import Collection

from kvc_trt.tool_calls.json_text import SPACE, JsonText

ARGUMENTS, IDENTITY = "[ARGS]", "[CALL_ID]"
"""The marks before the arguments, and before an id that some models write ahead of them; it is dropped."""
_LONGEST_HEAD = 200
"""Characters of name and id."""


class NamedCall:
    """A call from its name on. `push` it its characters, and take the arguments from `new_arguments`."""

    def __init__(self, names: Collection[str]) -> None:
        """Begin; `names` are those that a call may have."""
        self._names = names
        self.name: str | None = None
        self._head = ""
        self._value = JsonText()
        self._arguments = ""
        """Characters of the arguments that were not taken yet."""
        self.has_begun = False
        """True once it is certain to be a call: its name is known, and its arguments have begun."""

    @property
    def is_whole(self) -> bool:
        """True once its last brace has come."""
        return self._value.is_closed

    def new_arguments(self) -> str:
        """Return the text of the arguments that has arrived since the last call; nothing before `has_begun`."""
        new, self._arguments = self._arguments, ""
        return new

    def push(self, character: str) -> bool:
        """Take one more character; False if no call continues so."""
        if self.name is None:
            return self._push_head(character)
        if not self.has_begun:
            if character in SPACE:
                return True
            if character != "{":
                return False
            self.has_begun = True
        self._arguments += character
        return self._value.push(character)

    def _push_head(self, character: str) -> bool:
        self._head += character
        name = self._head.partition("[")[0].strip()
        if self._head.endswith(ARGUMENTS):
            self.name = name
            return name in self._names
        marks = (ARGUMENTS, IDENTITY)
        rest = self._head[self._head.find("[") :] if "[" in self._head else ""
        return (
            len(self._head) <= _LONGEST_HEAD
            and any(one.startswith(name) for one in self._names)
            and any(mark.startswith(rest[: len(mark)]) for mark in marks)
            and (not rest.startswith(ARGUMENTS) or rest == ARGUMENTS)
        )
