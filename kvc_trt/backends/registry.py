"""Find and choose backends. Nothing is substituted silently: the requested backend is used or refused with a reason."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvc_trt.backends.probes import probe_reference
from kvc_trt.errors import InputError, UnsupportedEnvironment, did_you_mean

if TYPE_CHECKING:
    from kvc_trt.backends.base import Backend
    from kvc_trt.backends.probes import Probe


def names() -> tuple[str, ...]:
    """Return the names of all backends from the folders beside this file, without importing them."""
    folders = (
        module.name for module in pkgutil.iter_modules(importlib.import_module(__package__).__path__) if module.ispkg
    )
    return tuple(folder.replace("_", "-") for folder in sorted(folders))


@cache
def backends() -> Mapping[str, Backend]:
    """Return every backend by name."""
    return MappingProxyType({name: _load(name) for name in names()})


def backend(name: str) -> Backend:
    """Return the backend of that name; InputError for an unknown one, suggesting the nearest."""
    found = backends().get(name)
    if found is None:
        known = ", ".join(names())
        raise InputError(f"unknown backend '{name}'{did_you_mean(name, names())}", hint=f"one of auto, {known}")
    return found


@dataclass(frozen=True)
class ChosenBackend:
    """The chosen backend, and the reason for the choice."""

    name: str
    versions: dict[str, str]
    reason: str


def select_backend(name: str = "auto", settings: Collection[str] = ()) -> ChosenBackend:
    """Return the backend to build for; `auto` takes the first that can run here.

    If none of the backends that `auto` tries takes a build's `settings`, `auto` is the one backend that does. Raises
    InputError for an unknown name; UnsupportedEnvironment, with the missing parts, for a backend that cannot run here.
    """
    if name == "auto":
        return _automatic(set(settings))
    probe = backend(name).probe()
    if not probe.usable:
        raise _unusable(probe)
    return ChosenBackend(name, probe.versions, "asked for")


def probe_all() -> list[Probe]:
    """Probe the reference and every backend, in the order in which doctor shows them."""
    return [probe_reference(), *(each.probe() for each in backends().values())]


def runners(built_for: str) -> tuple[str, ...]:
    """Return the backends that run engines built for a backend, the backend itself first."""
    own = backend(built_for)
    others = (each for each in backends().values() if each is not own and each.runs(own))
    return tuple(each.name for each in (own, *others) if each.executes)


def runner(built_for: str, name: str | None = None) -> str:
    """Return the backend that runs an engine: `name`, or else the one it was built for; InputError if it cannot."""
    chosen, able = name or built_for, runners(built_for)
    if chosen not in able:
        message = f"an engine built for {built_for} does not run on backend {chosen}; expected {' or '.join(able)}"
        another = f"build one for it: kvc-trt build --config ENGINE_DIR/config.json --backend {chosen} -o DIRECTORY"
        raise InputError(message, hint=backend(built_for).instead or (another if chosen in names() else None))
    return chosen


def program_backend() -> Backend:
    """Return the backend that runs engines in memory, with which a model is measured under many policies."""
    return next(each for each in backends().values() if each.runs_programs)


def _load(name: str) -> Backend:
    found: Backend = importlib.import_module(f"kvc_trt.backends.{name.replace('-', '_')}.backend").BACKEND
    assert found.name == name, f"the backend in folder {name} calls itself {found.name}"
    return found


def takers(settings: Collection[str]) -> list[Backend]:
    """Return the backends that take every one of these settings that is not for all backends."""
    own = {setting for each in backends().values() for setting in each.own_settings}
    return [each for each in backends().values() if own.intersection(settings) <= set(each.own_settings)]


def _automatic(settings: Collection[str]) -> ChosenBackend:
    candidates = [each for each in backends().values() if each.automatic is not None]
    able = takers(settings)
    if len(able) == 1 and able[0] not in candidates:
        found = select_backend(able[0].name)
        return ChosenBackend(found.name, found.versions, "the only one that takes these settings")
    for candidate in sorted(candidates, key=lambda each: each.automatic or 0):
        probe = candidate.probe()
        if probe.usable:
            return ChosenBackend(probe.name, probe.versions, "the first that can run here; kvc-trt doctor shows all")
    raise _unusable(probe)


def _unusable(probe: Probe) -> UnsupportedEnvironment:
    return UnsupportedEnvironment(
        f"backend {probe.name} cannot be used: {'; '.join(probe.missing)}",
        hint="; ".join(probe.install) or "--backend onnxruntime runs on any CPU",
    )
