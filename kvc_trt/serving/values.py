"""Check the value of one request field, and convert it to one Python type whatever form the client sent."""

from __future__ import annotations

from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.kinds import Kind
from kvc_trt.serving.fields import Field

_SWITCHES = {"true": True, "false": False}


def checked(field: Field, value: object) -> Any:
    """Return the value as str, int, float, bool, or a tuple of str or int; InputError, naming the field, otherwise.

    Text may come as UTF-8. A number or a switch may come as text, as some clients of vLLM send it.
    """
    found = field.kind.plain(_read(field, value), field.name)
    if field.only is not None and found != field.only:
        raise InputError(f"{field.name} is {describe(value)}, and this server only answers with {field.only}")
    return found


def _read(field: Field, value: object) -> object:
    """Convert a client's value to its field's type; return it unchanged if that fails, for `checked` to refuse."""
    if field.kind is Kind.TEXT:
        return _decoded(field, value)
    if field.kind is Kind.TEXTS:
        values = value if isinstance(value, (list, tuple)) else (value,)
        return [text for one in values if (text := _decoded(field, one)) != ""]  # clients send empty ones for none
    if not isinstance(value, str):
        return value
    try:
        if field.kind in (Kind.INTEGER, Kind.LARGE_INTEGER):
            return int(value)
        if field.kind is Kind.NUMBER:
            return float(value)
    except ValueError:
        return value
    return _SWITCHES.get(value.lower(), value) if field.kind is Kind.SWITCH else value


def _decoded(field: Field, value: object) -> object:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{field.name} is not valid UTF-8: byte {error.start} cannot be there") from error
