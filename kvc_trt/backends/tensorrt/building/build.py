"""The stages of a TensorRT engine: a plan for each graph, and TensorRT's description of it.

Listing a plan's layers and checking that it updates its state in place requires loading it, which needs a GPU. Host
code in plans is never allowed to run.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

from kvc_trt.backends.tensorrt import forecast
from kvc_trt.backends.tensorrt.building.builder import PlanOptions, write_plan
from kvc_trt.backends.tensorrt.building.profiles import Profile, decode_profiles, extend_profiles, prefill_profiles
from kvc_trt.backends.tensorrt.format import no_turns, plan_file
from kvc_trt.backends.tensorrt.lowering import check_aliases, engine_aliases, expected_aliases
from kvc_trt.backends.tensorrt.machine import GpuMachine, inspect_machine
from kvc_trt.backends.tensorrt.module import Messages, TensorRT, load_tensorrt
from kvc_trt.backends.tensorrt.plugins import PluginLibrary, load_plugins
from kvc_trt.backends.tensorrt.requirements import missing_here, refuse
from kvc_trt.engine.format import DECODE_FILE, EXTEND_FILE, PREFILL_FILE, WEIGHTS_FILE
from kvc_trt.engine.graph_stages import Maker
from kvc_trt.engine.manifest import canonical
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.cache import cache_root
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.state import state_tensors
from kvc_trt.progress import Progress

GRAPHS = {"prefill": PREFILL_FILE, "decode": DECODE_FILE, "extend": EXTEND_FILE}


def target(resolved: ResolvedBuild) -> dict[str, Any]:
    """Return the manifest's `target`; UnsupportedEnvironment if this machine cannot build the engine."""
    machine = _here()
    assert machine.gpu is not None
    return {
        "backend": "tensorrt",
        "architecture": machine.gpu.architecture,
        "tensorrt": machine.tensorrt,
        "plugins": _library(machine).record(),
        "compatibility": resolved.config.compatibility or "none",
    }


def makers(resolved: ResolvedBuild, progress: Progress) -> dict[str, Maker]:
    """Return the functions that make the plans and their descriptions; the first call of one loads TensorRT and the
    plugins."""
    stages: dict[str, Maker] = {}
    if (reason := no_turns(resolved.parameters)) is not None:
        progress.note(f"policy {resolved.parameters.policy}: the engine takes no turns: {reason}")
    for name in (name for name in GRAPHS if reason is None or name != "extend"):
        stages[f"{name}.engine"] = partial(_make_plan, name=name, resolved=resolved, progress=progress)
        stages[f"{name}.inspector"] = partial(_make_description, name=name, progress=progress)
    return stages


def profiles_of(resolved: ResolvedBuild, name: str) -> tuple[Profile, ...]:
    """Return the profiles of a graph's plan."""
    longest, batch = resolved.parameters.max_input_len, resolved.config.max_batch_size
    if name == "extend":
        return extend_profiles(longest)
    return prefill_profiles(longest, batch) if name == "prefill" else decode_profiles(batch)


def _make_plan(path: Path, *, finished: Path, name: str, resolved: ResolvedBuild, progress: Progress) -> None:
    machine = _here()
    trt, plugins = _tensorrt_with_plugins()
    weights = HeldFile(finished / WEIGHTS_FILE)
    profiles = profiles_of(resolved, name)
    check_memory(resolved, name, weights.size, machine, progress)
    options = PlanOptions(resolved.config.compatibility or "none", timing_cache_path(machine), plugins)
    with progress.task(f"building the {name} engine", None), path.open("wb") as file:
        report = write_plan(trt, _graph(finished, name), weights, profiles, file, options=options, progress=progress)
    layers = ", ".join(f"{count} x {operator}" for operator, count in report.plugins.items()) or "no plugins"
    progress.note(f"{name} engine: {layers}, {len(profiles)} profiles")
    for step, note in report.notes:
        progress.note(f"{name} engine: {step}: {note}")


def _make_description(path: Path, *, finished: Path, name: str, progress: Progress) -> None:
    _here()  # no driver, no runtime: see inspect_plan
    with progress.task(f"inspecting the {name} engine", None):
        found = inspect_plan(_tensorrt_with_plugins()[0], finished / plan_file(name), _graph(finished, name))
    path.write_bytes(canonical(found))


def check_memory(
    resolved: ResolvedBuild, name: str, weight_bytes: int, machine: GpuMachine, progress: Progress
) -> None:
    """Report the memory that building one plan needs; UnsupportedEnvironment if it does not fit."""
    import psutil

    state = state_tensors(
        resolved.model, resolved.parameters, resolved.dtype, turns=no_turns(resolved.parameters) is None
    )
    needed = forecast.estimate(resolved.model, state, name, profiles_of(resolved, name), weight_bytes)
    progress.note(f"building the {name} engine takes about {needed.as_text()}")
    free = forecast.FreeMemory(
        psutil.virtual_memory().available,
        None if machine.gpu is None else machine.gpu.free_bytes,
        "the GPU" if machine.gpu is None else machine.gpu.name,
    )
    forecast.check_fits(needed, free, f"the {name} engine")


def timing_cache_path(machine: GpuMachine) -> Path:
    """Return the file of kernel timings, one per TensorRT version and kind of GPU: TensorRT refuses others."""
    assert machine.gpu is not None
    kind = "".join(letter if letter.isalnum() else "-" for letter in machine.gpu.name)
    return cache_root() / "tensorrt" / f"timings-{machine.tensorrt}-{kind}.bin"


@cache
def _here() -> GpuMachine:
    machine = inspect_machine()
    refuse(missing_here(machine))
    return machine


def _library(machine: GpuMachine) -> PluginLibrary:
    """Return the plugin library for a build, the C++ one if present; `missing_here` checked that one is usable."""
    return next(library for library in machine.libraries if library.executor == "cuda")


def _tensorrt_with_plugins() -> tuple[TensorRT, frozenset[str]]:
    """Return TensorRT with the plugins in its registry, and their names."""
    trt = load_tensorrt()
    return trt, load_plugins(_library(_here()), trt).names


def _graph(finished: Path, name: str) -> ModelProto:
    import onnx

    load: Callable[..., ModelProto] = onnx.load
    return load(finished / GRAPHS[name], load_external_data=False)


def inspect_plan(trt: TensorRT, plan: Path, graph: ModelProto) -> dict[str, Any]:
    """Return the engine inspector's description of a plan built from `graph`; the plugins must be registered.

    Never call it without a driver: TensorRT then creates a runtime without an error, and its use ends the process.
    Raises UnsupportedEnvironment if the plan does not load, or copies its state instead of updating it in place.
    """
    messages = Messages()
    logger = messages.logger(trt)
    runtime = trt.Runtime(logger)
    with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise UnsupportedEnvironment(
            f"TensorRT {trt.__version__} does not load its own {graph.graph.name} engine: {messages.reason()}",
            hint="kvc-trt doctor shows the GPU and the plugin library in use",
        )
    check_aliases(engine_aliases(engine), expected_aliases(graph))
    inspector = engine.create_engine_inspector()
    found = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    if not isinstance(found, dict):
        raise UnsupportedEnvironment(f"TensorRT {trt.__version__} describes an engine as {type(found).__name__}")
    return found
