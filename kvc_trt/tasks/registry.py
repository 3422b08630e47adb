"""The tasks by name: every file in `kinds/` that defines `TASKS` adds its own."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.tasks import kinds
from kvc_trt.tasks.task import Task


@cache
def all_tasks() -> dict[str, Task]:
    """Every task, in the order of the files' names."""
    modules = [import_module(f"{kinds.__name__}.{found.name}") for found in iter_modules(kinds.__path__)]
    return {one.name: one for module in modules for one in getattr(module, "TASKS", ())}


def task(name: str) -> Task:
    """The task of that name; InputError names the nearest one."""
    known = all_tasks()
    if name not in known:
        raise InputError(
            f"unknown task {describe(name)}{did_you_mean(name.lower(), known)}", hint="kvc-trt tasks lists them"
        )
    return known[name]
