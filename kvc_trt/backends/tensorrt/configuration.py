"""How TensorRT's builder is set up: profiles, in-place state, exact fp32, details for the inspector, timings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvc_trt.backends.tensorrt.lowering import PLUGINS
from kvc_trt.backends.tensorrt.module import TensorRT
from kvc_trt.backends.tensorrt.network import Network
from kvc_trt.backends.tensorrt.profiles import Profile, input_shapes
from kvc_trt.errors import UnsupportedEnvironment

if TYPE_CHECKING:
    import tensorrt

Compatibility = Literal["none", "hardware"]
LARGEST_TIMING_CACHE = 256 << 20


@dataclass(frozen=True)
class PlanOptions:
    """How plans are built."""

    compatibility: Compatibility = "none"
    """"hardware": the plan also runs on later architectures, with kernels that suit all of them."""
    timing_cache: Path | None = None
    """Timings of kernels from earlier builds of this TensorRT on this GPU; written back afterwards."""
    plugins: frozenset[str] = PLUGINS
    """Operators in the plugin registry."""


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


def _earlier_timings(path: Path) -> bytes:
    """Timings of earlier builds; none where there are none, or where the file is no timing cache by its size."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= LARGEST_TIMING_CACHE:
            return path.read_bytes()
    return b""


def keep_timings(config: tensorrt.IBuilderConfig, path: Path) -> None:
    """Write the timings beside the old ones and put them in their place. Losing them costs time, not a build."""
    timings = bytes(config.get_timing_cache().serialize())
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(timings)
        new.replace(path)
