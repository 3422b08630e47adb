"""Find the objects that the files of this package define: kinds of eviction and of selection, and policies.

A method is known as soon as its file is in the package: every module is imported once, and its objects are found by
their type and registered by their name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

import kvc_trt.methods

Named = TypeVar("Named")


def objects(kind: type[Named]) -> Mapping[str, Named]:
    """Return every object of type `kind` that a module of this package defines, by its `name`."""
    known: Any = kind
    return cast("Mapping[str, Named]", _by_name(known, tuple(kvc_trt.methods.__path__)))


@cache
def _by_name(kind: type[Any], paths: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in (value for value in _values(paths) if isinstance(value, kind)):
        if found.setdefault(one.name, one) is not one:
            raise AssertionError(f"two {kind.__name__} objects are named {one.name!r}")
    return found


@cache
def _values(paths: tuple[str, ...]) -> tuple[object, ...]:
    """Return all module-level values of the package."""
    names = [module.name for module in pkgutil.iter_modules(paths)]
    modules = [importlib.import_module(f"{kvc_trt.methods.__name__}.{name}") for name in names]
    return tuple(value for module in modules for value in vars(module).values())
