"""From a graph to a plan: a checked network, built in pieces onto the disk.

Polygraphy's loaders are not used: they allow host code in engines, do not see plugin libraries that export
`getCreators` alone, and read weights into memory.

The module of TensorRT is an argument everywhere, so that tests can put NVIDIA's other builder in its place.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvc_trt.backends.tensorrt.configuration import PlanOptions, configuration, keep_timings
from kvc_trt.backends.tensorrt.lowering import expected_plugins
from kvc_trt.backends.tensorrt.module import TensorRT
from kvc_trt.backends.tensorrt.network import Network, parsed_network
from kvc_trt.backends.tensorrt.profiles import Profile
from kvc_trt.backends.tensorrt.progress import Kept, Phases, monitor
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.progress import NullProgress, Progress

if TYPE_CHECKING:
    import tensorrt
    from onnx import ModelProto


@dataclass(frozen=True)
class Report:
    """What went into a plan."""

    notes: tuple[tuple[str, str], ...]
    """(pass of the lowering, what it did)"""
    plugins: dict[str, int]
    """Plugin layers by operator."""
    warnings: tuple[str, ...]
    """The last things that TensorRT warned of."""


def build_plan(
    trt: TensorRT,
    model: ModelProto,
    weights: Path | None,
    profiles: Sequence[Profile],
    *,
    options: PlanOptions | None = None,
    progress: Progress | None = None,
) -> bytes:
    """The plan of one graph, in memory: for small graphs. `write_plan` is for engines."""
    plan = io.BytesIO()
    write_plan(trt, model, weights, profiles, plan, options=options, progress=progress)
    return plan.getvalue()


def write_plan(
    trt: TensorRT,
    model: ModelProto,
    weights: Path | None,
    profiles: Sequence[Profile],
    file: BinaryIO,
    *,
    options: PlanOptions | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the plan of `model`, one of our two graphs as they are in an engine directory, into `file`.

    `weights` is the file that its initializers refer to; None where none does. The plugins must be in the registry.
    Raises InputError for a graph that TensorRT does not run as intended, and UnsupportedEnvironment, with what TensorRT
    said, where it cannot be built here.
    """
    options, progress = options or PlanOptions(), progress or NullProgress()
    with parsed_network(trt, model, weights, options.plugins) as network:
        config = configuration(trt, network, profiles, options)
        _build(trt, network, config, file, progress)
        if options.timing_cache is not None:
            keep_timings(config, options.timing_cache)
        return Report(network.notes, expected_plugins(network.lowered), tuple(network.messages.warnings))


def _build(
    trt: TensorRT, network: Network, config: tensorrt.IBuilderConfig, file: BinaryIO, progress: Progress
) -> None:
    kept = Kept()
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


def _writer(trt: TensorRT, file: BinaryIO, kept: Kept) -> tensorrt.IStreamWriter:
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
