"""Build a plan from a graph: check the network and stream the plan to disk.

Polygraphy's loaders are not used: they allow host code in engines, do not see plugin libraries that export
only `getCreators`, and read weights into memory.

The TensorRT module is always an argument, so that tests can pass NVIDIA's other builder instead.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from kvc_trt.backends.tensorrt.building.network import Network, parsed_network
from kvc_trt.backends.tensorrt.building.profiles import Profile, input_shapes
from kvc_trt.backends.tensorrt.building.progress import CallbackErrors, Phases, monitor
from kvc_trt.backends.tensorrt.lowering import PLUGINS, expected_plugins
from kvc_trt.backends.tensorrt.module import TensorRT
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.atomic import write_whole
from kvc_trt.progress import NullProgress, Progress

if TYPE_CHECKING:
    import tensorrt
    from onnx import ModelProto

    from kvc_trt.files.held import HeldFile

Compatibility = Literal["none", "hardware"]
LARGEST_TIMING_CACHE = 256 << 20


@dataclass(frozen=True)
class PlanOptions:
    """Options for building plans."""

    compatibility: Compatibility = "none"
    """"hardware": the plan also runs on later architectures, with kernels that all of them support."""
    timing_cache: Path | None = None
    """Timings of kernels from earlier builds of this TensorRT on this GPU; written back afterwards."""
    plugins: frozenset[str] = PLUGINS
    """Names of the operators in the plugin registry."""


def configuration(
    trt: TensorRT, network: Network, profiles: Sequence[Profile], options: PlanOptions
) -> tensorrt.IBuilderConfig:
    """Return the builder's configuration: profiles, in-place state, exact fp32, details for the inspector, timings."""
    config = network.builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.compatibility == "hardware":
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    for profile in profiles:
        _add_profile(trt, network, config, profile)
    if options.timing_cache is not None:
        timings = config.create_timing_cache(_earlier_timings(options.timing_cache))
        if not config.set_timing_cache(timings, False):  # of another GPU or TensorRT version: start an empty one
            config.set_timing_cache(config.create_timing_cache(b""), False)
    return config


def _add_profile(trt: TensorRT, network: Network, config: tensorrt.IBuilderConfig, profile: Profile) -> None:
    made = network.builder.create_optimization_profile()
    for name, shapes in input_shapes(network.lowered, profile).items():
        smallest, fastest, largest = (trt.Dims(shape) for shape in shapes)
        made.set_shape(name, smallest, fastest, largest)
    if config.add_optimization_profile(made) < 0:
        raise UnsupportedEnvironment(f"TensorRT refuses the profile {profile}: {network.messages.reason()}")


def _earlier_timings(path: Path) -> bytes:
    """Return the timings of earlier builds; empty if there are none or the file cannot be a timing cache."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= LARGEST_TIMING_CACHE:
            return path.read_bytes()
    return b""


def keep_timings(config: tensorrt.IBuilderConfig, path: Path) -> None:
    """Replace the timings file atomically. Losing it costs time, not a build."""
    timings = bytes(config.get_timing_cache().serialize())
    with contextlib.suppress(OSError, UnsupportedEnvironment):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, timings)


@dataclass(frozen=True)
class PlanReport:
    """The contents of a built plan."""

    notes: tuple[tuple[str, str], ...]
    """(lowering pass, its note)"""
    plugins: dict[str, int]
    """Plugin layers by operator."""
    warnings: tuple[str, ...]
    """TensorRT's last warnings."""


def build_plan(
    trt: TensorRT,
    model: ModelProto,
    weights: HeldFile | None,
    profiles: Sequence[Profile],
    *,
    options: PlanOptions | None = None,
    progress: Progress | None = None,
) -> bytes:
    """Build the plan of a small graph in memory; engines use `write_plan`."""
    plan = io.BytesIO()
    write_plan(trt, model, weights, profiles, plan, options=options, progress=progress)
    return plan.getvalue()


def write_plan(
    trt: TensorRT,
    model: ModelProto,
    weights: HeldFile | None,
    profiles: Sequence[Profile],
    file: BinaryIO,
    *,
    options: PlanOptions | None = None,
    progress: Progress | None = None,
) -> PlanReport:
    """Write the plan of `model`, one of our graphs as they are in an engine directory, into `file`.

    `weights` is the file that its initializers refer to, or None. The plugins must be in the registry. Raises
    InputError for a graph that TensorRT does not run as intended, and UnsupportedEnvironment, with TensorRT's messages,
    if it cannot be built here.
    """
    options, progress = options or PlanOptions(), progress or NullProgress()
    with parsed_network(trt, model, weights, options.plugins) as network:
        config = configuration(trt, network, profiles, options)
        _build(trt, network, config, file, progress)
        if options.timing_cache is not None:
            keep_timings(config, options.timing_cache)
        return PlanReport(network.notes, expected_plugins(network.lowered), tuple(network.messages.warnings))


def _build(
    trt: TensorRT, network: Network, config: tensorrt.IBuilderConfig, file: BinaryIO, progress: Progress
) -> None:
    kept = CallbackErrors()
    phases = Phases(progress, kept)
    reports, writer = monitor(trt, phases, kept), _writer(trt, file, kept)
    network.kept += [reports, writer]
    config.progress_monitor = reports
    try:
        built = network.builder.build_serialized_network_to_stream(network.definition, config, writer)
    finally:
        phases.close()
    kept.raise_again()
    if not built:
        raise UnsupportedEnvironment(
            f"TensorRT {trt.__version__} cannot build {network.lowered.graph.name}: {network.messages.reason()}",
            hint="kvc-trt doctor shows the GPU and the plugin library in use",
        )


def _writer(trt: TensorRT, file: BinaryIO, kept: CallbackErrors) -> tensorrt.IStreamWriter:
    base: Any = trt.IStreamWriter

    class Writer(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except BaseException as error:
                kept.keep(error)
                return 0

    return Writer()  # type: ignore[no-any-return]
