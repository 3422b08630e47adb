"""The stages of an engine that TensorRT-LLM's builder makes: the graphs and the weights, then a plan for each graph.

The plans have the same inputs, outputs and profiles as those of the tensorrt backend. They have not been executed yet:
docs/tensorrt-llm.md lists what was checked and what was not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvc_trt.backends.tensorrt.machine import GpuMachine, inspect_machine
from kvc_trt.backends.tensorrt.plugins import PluginLibrary, load_plugins
from kvc_trt.backends.tensorrt.requirements import missing_here, refuse
from kvc_trt.backends.tensorrt_llm.builder_api import PACKAGES, BuilderApi, installed, load_builder_api, require_builder
from kvc_trt.backends.tensorrt_llm.layers import NetworkLayers
from kvc_trt.backends.tensorrt_llm.networks import define_decode, define_prefill
from kvc_trt.engine.graph_stages import Maker
from kvc_trt.engine.resolution.model_choice import ModelSource
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.progress import Progress


def target(resolved: ResolvedBuild) -> dict[str, Any]:
    """Return the manifest's `target`; UnsupportedEnvironment if this machine cannot build the engine."""
    machine = _here()
    assert machine.gpu is not None
    return {
        "backend": "tensorrt-llm",
        "architecture": machine.gpu.architecture,
        "tensorrt": machine.tensorrt,
        "tensorrt_llm": installed("tensorrt_llm"),
        "plugins": _library(machine).record(),
        "compatibility": "none",
    }


def makers(resolved: ResolvedBuild, source: ModelSource, progress: Progress) -> dict[str, Maker]:
    """Return the functions that make the plans; the first call of one imports TensorRT-LLM."""
    parameters, batch = resolved.parameters, resolved.config.max_batch_size

    def layers() -> NetworkLayers:
        return NetworkLayers(_api_with_plugins(), resolved.model, source.weights, parameters.max_sequence_len)

    def prefill(path: Path, *, finished: Path) -> None:
        with progress.task("building the prefill engine", None):
            _write_plan(path, resolved.dtype, lambda: define_prefill(layers(), parameters, batch))

    def decode(path: Path, *, finished: Path) -> None:
        until = parameters.slice_limit
        with progress.task("building the decode engine", None):
            _write_plan(path, resolved.dtype, lambda: define_decode(layers(), parameters, batch, until))

    return {"prefill.engine": prefill, "decode.engine": decode}


def build_plan(api: BuilderApi, dtype: str, define: Callable[[], None]) -> Any:
    """Build the network to which `define` adds layers; return the plan as a buffer.

    Raises UnsupportedEnvironment if TensorRT refuses it; its log says why.
    """
    builder = api.make_builder()
    network = builder.create_network()
    with api.net_guard(network):
        define()
    config = builder.create_builder_config(dtype, strongly_typed=True, profiling_verbosity="detailed")
    # Without this flag TensorRT refuses plugins that write their cache in place.
    config.trt_builder_config.set_preview_feature(api.tensorrt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    try:
        return builder.build_engine(network, config)
    except AssertionError as error:
        raise UnsupportedEnvironment(
            f"TensorRT-LLM {api.version} could not build the engine: {error}",
            hint="the lines above give TensorRT's reason",
        ) from error


def _write_plan(path: Path, dtype: str, define: Callable[[], None]) -> None:
    with path.open("wb") as file:
        file.write(build_plan(_api_with_plugins(), dtype, define))


@cache
def _here() -> GpuMachine:
    """Return this machine, which has everything that a build needs."""
    require_builder()
    machine = inspect_machine()
    refuse(missing_here(machine, PACKAGES))
    return machine


def _library(machine: GpuMachine) -> PluginLibrary:
    """Return the plugin library for a build, the C++ one if present; `missing_here` checked that one is usable."""
    return next(library for library in machine.libraries if library.executor == "cuda")


@cache
def _api_with_plugins() -> BuilderApi:
    """Return the builder with our plugins registered, once per process: a library cannot be loaded twice."""
    library, api = _library(_here()), load_builder_api()
    load_plugins(library, api.tensorrt)
    return api
