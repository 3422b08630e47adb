"""Open engines on the backends that run them: sessions, and what verifies and profiles them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.registry import backend, backends, runner, runners
from kvc_trt.backends.reported_lists import open_with_lists
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.contexts import packing_of
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.supported import check_supported
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.progress import NullProgress
from kvc_trt.runtime import Session
from kvc_trt.runtime.executor import WarmingExecutor

if TYPE_CHECKING:
    from kvc_trt.backends.base import Backend
    from kvc_trt.backends.benchmark import Benchmark
    from kvc_trt.backends.harness import Harness
    from kvc_trt.progress import Progress


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
    check_supported(engine.parameters, engine.model, name, backends())
    found.check_options(options)
    return found
