"""Find and choose backends. Nothing is substituted silently: the requested backend is used or refused with a reason."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.probes import probe_reference
from kvc_trt.backends.reported_lists import open_with_lists
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.contexts import packing_of
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.supported import check_supported
from kvc_trt.errors import InputError, UnsupportedEnvironment, did_you_mean
from kvc_trt.progress import NullProgress
from kvc_trt.runtime import Session
from kvc_trt.runtime.executor import WarmingExecutor

if TYPE_CHECKING:
    from kvc_trt.backends.base import Backend
    from kvc_trt.backends.benchmark import Benchmark
    from kvc_trt.backends.harness import Harness
    from kvc_trt.backends.probes import Probe
    from kvc_trt.progress import Progress


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
        raise InputError(message, hint=backend(built_for).instead)
    return chosen


def program_backend() -> Backend:
    """Return the backend that runs engines in memory, with which a model is measured under many policies."""
    return next(each for each in backends().values() if each.runs_programs)


def open_engine(
    path: str | PathLike[str], *, sealed: bool = False, progress: Progress | None = None
) -> EngineDirectory:
    """Check and open an engine directory of any backend; InputError as in `EngineDirectory.open`."""
    return EngineDirectory.open(Path(path), backends(), sealed=sealed, progress=progress)


def open_session(
    engine_dir: str | PathLike[str],
    options: RunOptions = DEFAULTS,
    *,
    max_batch_size: int = 1,
    progress: Progress | None = None,
    **executor_options: Any,
) -> Session:
    """Open a session over an engine directory, which is checked before anything is loaded.

    Backend torch runs the weights of any engine in PyTorch around the kernels, and onnxruntime runs the graphs of
    engines that have them in its types. `executor_options` are for that backend's executor alone. Raises InputError for
    an engine that is damaged or cannot do what the options say, UnsupportedEnvironment if this machine cannot run it.
    """
    engine = open_engine(engine_dir, progress=progress)
    return session_of(engine, options, max_batch_size=max_batch_size, progress=progress, **executor_options)


def session_of(
    engine: EngineDirectory,
    options: RunOptions = DEFAULTS,
    *,
    max_batch_size: int = 1,
    progress: Progress | None = None,
    **executor_options: Any,
) -> Session:
    """Open a session over an engine directory that is open already; arguments and errors as for `open_session`."""
    chosen = _able(runner(engine.backend, options.backend), engine, options)
    executor, lists = (
        open_with_lists(engine, _giving_proofs(chosen, engine), options)
        if options.proofs
        else (chosen.open(engine, options, **executor_options), None)
    )
    with (progress or NullProgress()).task("loading the engine", None):
        executor.load()
    session = Session(
        executor,
        engine.tokenizer,
        max_batch_size,
        end_token_ids=engine.model.eos_token_ids,
        packing=packing_of(engine),
        prefix_bytes=options.prefix_bytes,
        speculation=options.speculation,
        lists=lists,
        progress=progress,
    )
    if options.warm_up and isinstance(executor, WarmingExecutor):
        executor.warm_up(progress or NullProgress(), drafts=options.speculation is not None)
    return session


def _giving_proofs(chosen: Backend, engine: EngineDirectory) -> Backend:
    """Return the backend; InputError, naming others, if its executors do not report the tokens that they read."""
    if chosen.no_proofs is not None:
        able = [f"--backend {name}" for name in runners(engine.backend) if backend(name).no_proofs is None]
        raise InputError(f"KV proof: {chosen.no_proofs}", hint=" or ".join(able) or None)
    return chosen


def harness_for(engine: EngineDirectory, options: RunOptions = DEFAULTS) -> Harness:
    """Return the engine's harness on a backend; InputError for a backend without the policy's kernels."""
    chosen = _able(options.backend or runner(engine.backend), engine, options)
    return chosen.harness(engine, options)


def benchmark_for(engine: EngineDirectory, options: RunOptions = DEFAULTS) -> Benchmark:
    """Return the engine's benchmark on the backend that it was built for, whatever the options name.

    UnsupportedEnvironment for a backend that does not run engines.
    """
    built_for = backend(engine.backend)
    if not built_for.executes:
        *others, last = (name for name, each in backends().items() if each.executes)
        raise UnsupportedEnvironment(
            f"{engine.path} was built for {engine.backend}; profile runs engines for {', '.join(others)} and {last}",
            hint=built_for.profile_instead,
        )
    built_for.check_options(options)
    return built_for.benchmark(engine, options)


def _able(name: str, engine: EngineDirectory, options: RunOptions) -> Backend:
    """Return the backend; InputError if it is unknown, or does not support the engine's policy or the options."""
    found = backend(name)
    check_supported(engine.parameters, engine.model.num_hidden_layers, name, backends())
    found.check_options(options)
    return found


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
