"""From a graph to a plan: lowered, parsed, checked, given profiles, and built in pieces onto the disk.

Weights are mapped from their file and handed to the parser by address: nothing reads or copies them before TensorRT
does. Polygraphy's loaders are not used: they allow host code in engines, do not see plugin libraries that export
`getCreators` alone, and read weights into memory.

The module of TensorRT is an argument everywhere, so that tests can put NVIDIA's other builder in its place.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from kvc_trt.backends.tensorrt.lowering import OPERATORS, check_network, expected_plugins, lower_with_notes
from kvc_trt.backends.tensorrt.module import TensorRT, version_of
from kvc_trt.backends.tensorrt.profiles import Profile, input_shapes
from kvc_trt.backends.tensorrt.progress import Kept, Phases, monitor
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.progress import NullProgress, Progress

if TYPE_CHECKING:
    import tensorrt
    from onnx import ModelProto

Compatibility = Literal["none", "hardware"]
LARGEST_TIMING_CACHE = 256 << 20
MESSAGES_KEPT = 20


@dataclass(frozen=True)
class PlanOptions:
    """How plans are built."""

    compatibility: Compatibility = "none"
    """"hardware": the plan also runs on later architectures, with kernels that suit all of them."""
    timing_cache: Path | None = None
    """Timings of kernels from earlier builds of this TensorRT on this GPU; written back afterwards."""
    plugins: frozenset[str] = OPERATORS
    """Operators in the plugin registry."""


@dataclass(frozen=True)
class Report:
    """What went into a plan."""

    notes: tuple[tuple[str, str], ...]
    """(pass of the lowering, what it did)"""
    plugins: dict[str, int]
    """Plugin layers by operator."""
    warnings: tuple[str, ...]
    """The last things that TensorRT warned of."""


@dataclass
class Network:
    """A parsed network with everything that has to live as long as it."""

    builder: tensorrt.Builder
    definition: tensorrt.INetworkDefinition
    lowered: ModelProto
    messages: Messages
    notes: tuple[tuple[str, str], ...]
    kept: list[Any] = field(default_factory=list)


class Messages:
    """What TensorRT said: warnings and errors, the last ones. `logger` hands it over."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=MESSAGES_KEPT)
        self.warnings: deque[str] = deque(maxlen=MESSAGES_KEPT)

    def reason(self) -> str:
        """The last errors in one line; what plugins said stands on stderr."""
        return "; ".join(" ".join(message.split()) for message in list(self.errors)[-3:]) or "it gave no reason"

    def logger(self, trt: TensorRT) -> tensorrt.ILogger:
        """An ILogger of `trt`; the builder wants it to outlive everything else."""
        base: Any = trt.ILogger
        severity, messages = base.Severity, self

        class Logger(base):  # type: ignore[misc]
            def __init__(self) -> None:
                base.__init__(self)

            def log(self, level: Any, message: str) -> None:
                if level in (severity.INTERNAL_ERROR, severity.ERROR):
                    messages.errors.append(message)
                elif level == severity.WARNING:
                    messages.warnings.append(message)

        return Logger()  # type: ignore[no-any-return]


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
            _keep_timings(config, options.timing_cache)
        return Report(network.notes, expected_plugins(network.lowered), tuple(network.messages.warnings))


@contextlib.contextmanager
def parsed_network(
    trt: TensorRT, model: ModelProto, weights: Path | None, plugins: frozenset[str] = OPERATORS
) -> Iterator[Network]:
    """The network of a graph behind lowering, parser and checks; `weights` stays mapped while the block runs."""
    done = lower_with_notes(model, tensorrt=version_of(trt), plugins=plugins)
    messages = Messages()
    logger = messages.logger(trt)
    builder = trt.Builder(logger)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    definition = builder.create_network(typed)
    parser = trt.OnnxParser(definition, logger)
    network = Network(builder, definition, done.model, messages, done.notes, [logger, parser])
    with contextlib.ExitStack() as stack:
        if not parser.load_model_proto(done.model.SerializeToString()):
            raise _refused(network, parser, "read")
        _hand_over_weights(network, parser, weights, stack)
        if not parser.parse_model_proto():
            raise _refused(network, parser, "parse")
        check_network(definition, done.model)
        yield network


def external_data(model: ModelProto, file: str | None) -> list[tuple[str, int, int]]:
    """(name, offset, bytes) of every initializer that lies in the file of this name; InputError for another file."""
    places = []
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if not place:
            continue
        if place["location"] != file:
            raise InputError(f"{tensor.name} lies in {place['location']}, expected {file or 'it in the graph'}")
        places.append((tensor.name, int(place.get("offset", 0)), int(place["length"])))
    return places


def _hand_over_weights(
    network: Network, parser: tensorrt.OnnxParser, weights: Path | None, stack: contextlib.ExitStack
) -> None:
    places = external_data(network.lowered, None if weights is None else weights.name)
    if weights is None or not places:
        return
    data = stack.enter_context(_mapped(weights))
    for name, offset, size in places:
        if offset + size > len(data):
            raise InputError(f"{weights} is too short: expected at least {offset + size} bytes, for {name}")
        if not parser.load_initializer(name, _address(data) + offset, size):
            raise _refused(network, parser, f"take the weights {name} of")


def configuration(
    trt: TensorRT, network: Network, profiles: Sequence[Profile], options: PlanOptions
) -> tensorrt.IBuilderConfig:
    """The builder's configuration: profiles, in-place state, exact fp32, details for the inspector, timings."""
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
        if not config.set_timing_cache(timings, False):  # of another GPU or TensorRT: begun anew
            config.set_timing_cache(config.create_timing_cache(b""), False)
    return config


def _add_profile(trt: TensorRT, network: Network, config: tensorrt.IBuilderConfig, profile: Profile) -> None:
    made = network.builder.create_optimization_profile()
    for name, shapes in input_shapes(network.lowered, profile).items():
        smallest, fastest, largest = (trt.Dims(shape) for shape in shapes)
        made.set_shape(name, smallest, fastest, largest)
    if config.add_optimization_profile(made) < 0:
        raise UnsupportedEnvironment(f"TensorRT refuses the profile {profile}: {network.messages.reason()}")


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


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """The file's bytes, read-only. Views of it must be gone at the end."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the weights {path}: {error}") from error
    with data:
        yield data


def _address(data: mmap.mmap) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _refused(network: Network, parser: tensorrt.OnnxParser, doing: str) -> UnsupportedEnvironment:
    errors = [str(parser.get_error(index).desc()) for index in range(parser.num_errors)]
    reason = "; ".join(" ".join(error.split()) for error in errors[:3]) or network.messages.reason()
    return UnsupportedEnvironment(
        f"TensorRT's parser cannot {doing} the {network.lowered.graph.name} graph: {reason}",
        hint="kvc-trt doctor shows the TensorRT and the plugin library in use",
    )


def _earlier_timings(path: Path) -> bytes:
    """Timings of earlier builds; none where there are none, or where the file is no timing cache by its size."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= LARGEST_TIMING_CACHE:
            return path.read_bytes()
    return b""


def _keep_timings(config: tensorrt.IBuilderConfig, path: Path) -> None:
    """Write the timings beside the old ones and put them in their place. Losing them costs time, not a build."""
    timings = bytes(config.get_timing_cache().serialize())
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(timings)
        new.replace(path)
