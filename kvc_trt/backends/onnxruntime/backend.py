"""ONNX Runtime on the CPU: the embedded default, which executes operators by a native library or by their bodies."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from kvc_trt.backends.base import Backend
from kvc_trt.backends.onnxruntime.native import describe_choice, how_to_get, native_operators
from kvc_trt.backends.onnxruntime.packed_copies import passes_pack, steps_pack
from kvc_trt.backends.probes import Probe, import_package
from kvc_trt.backends.run_options import PREFILL_PRECISIONS
from kvc_trt.engine.backend import FP8
from kvc_trt.engine.resolution.resolved_build import host_weights
from kvc_trt.models.cache_formats import CACHE_FORMATS

if TYPE_CHECKING:
    from pathlib import Path

    from kvc_trt.backends.onnxruntime.benchmark import OnnxRuntimeBenchmark
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
    from kvc_trt.backends.onnxruntime.harness import OnnxRuntimeHarness
    from kvc_trt.backends.onnxruntime.prefill.shared_prefill import OnnxRuntimePrograms
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.engine.resolution.model_choice import ModelChoice
    from kvc_trt.engine.resolution.resolved_build import WeightKind
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig

OLDEST = (1, 23)


class OnnxRuntimeBackend(Backend):
    """Runs the graphs of the engine directory unchanged."""

    name = "onnxruntime"
    purpose = "any CPU; the default"
    automatic: ClassVar[int | None] = 1
    architecture = "cpu"
    libraries: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    weight_kinds = ("fp32", "fp16", "int8", "int4", "keep")
    refused_weights = MappingProxyType({"bf16": "ONNX Runtime computes no bfloat16 on a CPU", "fp8": FP8})
    cache_formats = tuple(CACHE_FORMATS)
    every_operator = True
    runs_programs = True
    prefill_precisions = PREFILL_PRECISIONS
    measures_break_even = True

    @override
    def probe(self) -> Probe:
        """Check for the package in a version whose scatter works in place, and for native operators."""
        versions, missing = import_package("onnxruntime")
        if not missing and _numbers(versions["onnxruntime"]) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            missing = (f"onnxruntime {oldest} or newer, found {versions['onnxruntime']}",)
        install = ("pip install --upgrade onnxruntime",) if missing else ()
        versions = {**versions, "native operators": describe_choice()}
        if not missing and (command := how_to_get()) is not None:
            install = (command,)
        return Probe(self.name, self.purpose, not missing, versions, missing, install)

    @override
    def default_weights(self, choice: ModelChoice) -> WeightKind:
        """Return keep for a checkpoint whose quantised blocks an engine can hold unchanged, otherwise fp32."""
        return "keep" if choice.blocks else host_weights(choice)

    @override
    def break_even(self, model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
        from kvc_trt.backends.onnxruntime.benchmark import break_even

        return break_even(model, parameters, dtype)

    @override
    def runs(self, other: Backend) -> bool:
        """Return whether the other backend's engines consist of graphs in types that its kernels support."""
        return other.files == self.files

    @override
    def open(self, engine: EngineDirectory, options: RunOptions, **own: Any) -> OnnxRuntimeExecutor:
        from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

        return OnnxRuntimeExecutor(engine, options, **own)

    @override
    def packed_copies(self, weights: str, size: float, *, drafts: bool) -> tuple[str, ...]:
        """Return those of steps and draft passes that keep a packed copy with the native operators of this machine."""
        quantised = weights in ("int8", "int4", "keep")
        native = native_operators("float16" if weights == "fp16" else "float32")
        steps = steps_pack(size, quantised=quantised, native=native)
        passes = drafts and passes_pack(steps, quantised=quantised, native=native)
        return (*(("steps",) if steps else ()), *(("passes over drafts",) if passes else ()))

    @override
    def kernels(self, engine: EngineDirectory) -> str | None:
        """Return the library of native operators that its sessions use, if there is one."""
        found = native_operators(engine.model.dtype)
        return None if found is None else found.describe()

    @override
    def program_runner(
        self, weights_directory: Path, options: RunOptions, *, share_prefill: bool
    ) -> OnnxRuntimePrograms:
        from kvc_trt.backends.onnxruntime.prefill.shared_prefill import OnnxRuntimePrograms, SharedPrefill

        return OnnxRuntimePrograms(options, SharedPrefill(weights_directory) if share_prefill else None)

    @override
    def harness(self, engine: EngineDirectory, options: RunOptions) -> OnnxRuntimeHarness:
        from kvc_trt.backends.onnxruntime.harness import OnnxRuntimeHarness

        return OnnxRuntimeHarness(engine, options)

    @override
    def benchmark(self, engine: EngineDirectory, options: RunOptions) -> OnnxRuntimeBenchmark:
        return self.program_benchmark(engine.model, options)

    @override
    def program_benchmark(self, model: ModelConfig, options: RunOptions) -> OnnxRuntimeBenchmark:
        from kvc_trt.backends.onnxruntime.benchmark import OnnxRuntimeBenchmark

        return OnnxRuntimeBenchmark(options, model.dtype)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


BACKEND = OnnxRuntimeBackend()
