"""The value of one field of a request: checked, and of one Python type, wherever it comes from."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.answer_rules import Kind
from kvc_trt.serving.fields import Field


def checked(field: Field, value: object) -> Any:
    """Return the value as str, int, float, bool, or a tuple of str or int; InputError, naming the field, otherwise.

    Text may come as UTF-8. A number or a switch may come as text, as some clients of vLLM send it.
    """
    found = _CHECKS[field.kind](field, value)
    if field.only is not None and found != field.only:
        raise InputError(f"{field.name} is {describe(value)}, and this server only answers with {field.only}")
    return found


def _text(field: Field, value: object) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{field.name} is not valid UTF-8: byte {error.start} cannot be there") from error
    if not isinstance(value, str):
        raise _unexpected(field, value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{field.name} is not valid Unicode: character {error.start} is half of one") from error
    return value


def _texts(field: Field, value: object) -> tuple[str, ...]:
    """Drop empty ones: clients send them for none."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(text for one in values if (text := _text(field, one)))


def _tokens(field: Field, value: object) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise _unexpected(field, value)
    return tuple(_integer(field, token) for token in value)


def _integer(field: Field, value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError as error:
            raise _unexpected(field, value) from error
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _unexpected(field, value)
    return int(value)


def _large_integer(field: Field, value: object) -> int:
    found = _integer(field, value)
    if not 0 <= found < 1 << 64:
        raise _unexpected(field, value)
    return found


def _number(field: Field, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise _unexpected(field, value)
    try:
        found = float(value)
    except (ValueError, OverflowError) as error:
        raise _unexpected(field, value) from error
    if not math.isfinite(found):
        raise _unexpected(field, value)
    return found


def _switch(field: Field, value: object) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise _unexpected(field, value)
    return value


def _unexpected(field: Field, value: object) -> InputError:
    return InputError(f"{field.name} is {describe(value)}, expected {field.kind.value}")


_CHECKS = {
    Kind.TEXT: _text,
    Kind.TEXTS: _texts,
    Kind.TOKENS: _tokens,
    Kind.INTEGER: _integer,
    Kind.LARGE_INTEGER: _large_integer,
    Kind.NUMBER: _number,
    Kind.SWITCH: _switch,
}
