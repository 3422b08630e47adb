"""What each backend brings to a build: its stages' makers, the target in its manifest, and a measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvc_trt.engine.build import Makers
from kvc_trt.engine.model_choice import ModelSource
from kvc_trt.engine.request import MeasureBreakEven, Request
from kvc_trt.engine.targets import STAGES, portable_target
from kvc_trt.errors import InputError
from kvc_trt.progress import Progress


@dataclass(frozen=True)
class Builder:
    """How engines of one backend are built."""

    makers: Callable[[Request, ModelSource, Progress], Makers]
    target: Callable[[Request], Mapping[str, Any]]
    """`target` of the manifest. UnsupportedEnvironment where this machine cannot build for it."""
    measure_break_even: MeasureBreakEven
    """What `--dense-until auto` asks."""


def builder_for(backend: str) -> Builder:
    """The builder of a backend; InputError for one that has no engine directories."""
    if backend == "tensorrt":
        from kvc_trt.backends.tensorrt import build

        return Builder(build.makers, build.target, build.measure_break_even)
    if backend == "tensorrt-llm":
        from kvc_trt.backends.tensorrt_llm import build as llm

        return Builder(llm.makers, llm.target, llm.measure_break_even)
    if backend in ("onnxruntime", "torch"):
        from kvc_trt.backends.onnxruntime.build import makers

        if backend == "torch":
            from kvc_trt.backends.torch.break_even import break_even
        else:
            from kvc_trt.backends.onnxruntime.break_even import break_even
        return Builder(makers, lambda request: portable_target(backend), break_even)
    raise InputError(f"backend {backend} builds no engine directory; expected {', '.join(STAGES)}")
