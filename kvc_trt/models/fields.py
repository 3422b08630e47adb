"""Typed reading of untrusted mappings (config.json, presets): every mistake becomes one line that names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvc_trt.errors import InputError

_REQUIRED = object()


class Fields:
    """Fields of a mapping with their checks. `messages` renames fields in errors, where the file has other names."""

    def __init__(self, mapping: object, source: str, messages: Mapping[str, str] | None = None) -> None:
        if not isinstance(mapping, Mapping):
            raise InputError(f"{source}: expected an object of fields, found {describe(mapping)}")
        self.mapping: Mapping[str, Any] = mapping
        self.source = source
        self._messages = messages or {}

    def raw(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value as it stands; null and absent fields give the default."""
        value = self.mapping.get(name)
        if value is None:
            if default is _REQUIRED:
                raise InputError(f"{self.source}: field {self._messages.get(name, name)!r} is missing")
            return default
        return value

    def fail(self, name: str, expected: str, value: object) -> InputError:
        """The error for a field whose value cannot be right."""
        return InputError(f"{self.source}: {self._messages.get(name, name)} is {describe(value)}, expected {expected}")

    def integer(self, name: str, minimum: int, maximum: int, default: Any = _REQUIRED) -> int:
        """An integer within [minimum, maximum]; booleans and floats are refused."""
        value = self.raw(name, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.fail(name, f"an integer in {minimum}..{maximum}", value)
        return value

    def number(self, name: str, minimum: float, maximum: float, default: Any = _REQUIRED) -> float:
        """A finite number within [minimum, maximum], as float."""
        value = self.raw(name, default)
        if type(value) not in (int, float) or not minimum <= value <= maximum or not math.isfinite(value):
            raise self.fail(name, f"a number in {minimum:g}..{maximum:g}", value)
        return float(value)

    def boolean(self, name: str, default: Any = _REQUIRED) -> bool:
        """true or false, nothing else."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false", value)
        return value

    def text(self, name: str, allowed: tuple[str, ...] | None = None, default: Any = _REQUIRED) -> str:
        """A string, out of `allowed` where given."""
        value = self.raw(name, default)
        if not isinstance(value, str) or (allowed is not None and value not in allowed):
            raise self.fail(name, f"one of {', '.join(allowed)}" if allowed else "a string", value)
        return value


def describe(value: object, limit: int = 60) -> str:
    """A short, single-line rendering of a foreign value for an error message."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer too long to print, or absurd nesting
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= limit else text[: limit - 3] + "..."
