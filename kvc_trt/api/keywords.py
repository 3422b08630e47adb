"""Arguments of the API's functions, checked as the command line checks its options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.runtime.kinds import is_integer
from kvc_trt.sizes import bytes_of


def check_fields(given: Iterable[str], request: type, *named: str) -> None:
    """Raise TypeError, with the nearest, for a keyword that is no field of the dataclass `request`, nor of `named`."""
    known = (*named, *(field.name for field in fields(request)))
    for name in given:
        if name not in known:
            near = did_you_mean(name, known) or f", expected one of {', '.join(known)}"
            raise TypeError(f"unknown keyword {name!r}{near}")


def size(name: str, given: int | str) -> int:
    """Return the bytes of a number, or of a text such as 60MiB; InputError, which begins with `name`, for others."""
    found = bytes_of(given) if isinstance(given, str) else given
    if found is None or not is_integer(found):
        raise InputError(f"{name}: expected a number of bytes, or a text such as '60MiB', found {describe(given)}")
    return int(found)
