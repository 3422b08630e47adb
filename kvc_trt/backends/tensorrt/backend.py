"""TensorRT on an NVIDIA GPU: the graphs compiled, each `kvc` operator a plugin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvc_trt.backends.base import Backend
from kvc_trt.backends.probes import Probe
from kvc_trt.backends.tensorrt.forecast import device_memory
from kvc_trt.backends.tensorrt.format import WITH_DESCRIPTIONS, no_turns, target_problem
from kvc_trt.backends.tensorrt.parts import missing_part
from kvc_trt.engine.backend import QUANTISED
from kvc_trt.models.cache_formats import CACHE_FORMATS

if TYPE_CHECKING:
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.backends.tensorrt.benchmark import TensorRtBenchmark
    from kvc_trt.backends.tensorrt.harness import TensorRtHarness
    from kvc_trt.backends.tensorrt.running.executor import TensorRtExecutor
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.engine.graph_stages import Makers
    from kvc_trt.engine.resolution.model_choice import ModelChoice, ModelSource
    from kvc_trt.engine.resolution.resolved_build import ResolvedBuild, WeightKind
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.progress import Progress

COMPILING = ("lowering/*.py", *(f"building/{name}.py" for name in ("build", "builder", "network", "profiles")))
"""Source files of this folder that determine a plan."""


class TensorRtBackend(Backend):
    """Compiles the graphs, and runs the plans."""

    name = "tensorrt"
    purpose = "NVIDIA GPU through TensorRT and our plugins"
    automatic = 0
    files = WITH_DESCRIPTIONS
    libraries = ("tensorrt",)
    weight_copies = 4
    weight_kinds = ("bf16", "fp16", "fp32", "fp8")
    cache_formats = tuple(CACHE_FORMATS)
    refused_weights = MappingProxyType({"int8": QUANTISED, "int4": QUANTISED, "keep": QUANTISED})
    own_settings = ("compatibility",)
    no_proofs = "plans of TensorRT have no outputs for the lists of tokens that steps read"

    @override
    def probe(self) -> Probe:
        """Check packages, driver, GPU and plugin library as a build or a run does."""
        from kvc_trt.backends.tensorrt.requirements import FOR_GRAPHS, probe_machine

        versions, missing = probe_machine(FOR_GRAPHS)
        hints = tuple(dict.fromkeys(one.hint for one in missing))
        return Probe(self.name, self.purpose, not missing, versions, tuple(map(str, missing)), hints)

    @override
    def default_weights(self, choice: ModelChoice) -> WeightKind:
        """Return the checkpoint's own type, also for fp8."""
        return "fp8" if choice.quantised == "fp8" else super().default_weights(choice)

    @override
    def target(self, resolved: ResolvedBuild) -> Mapping[str, Any]:
        """Return the architecture, the TensorRT version and the plugin library that the plans are for."""
        from kvc_trt.backends.tensorrt.building.build import target

        return target(resolved)

    @override
    def target_problem(self, target: Any) -> str | None:
        return target_problem(target, self.name, frozenset({"tensorrt"}))

    @override
    def missing_part(self, model: ModelConfig) -> str | None:
        return missing_part(model)

    @override
    def makers(self, resolved: ResolvedBuild, source: ModelSource, progress: Progress) -> Makers:
        from kvc_trt.backends.tensorrt.building.build import makers

        return {**super().makers(resolved, source, progress), **makers(resolved, progress)}

    @override
    def no_turns(self, parameters: PolicyParameters) -> str | None:
        return no_turns(parameters)

    @override
    def sources(self) -> Iterable[Path]:
        """Return the source files that lower and compile the graphs."""
        return (path for pattern in COMPILING for path in Path(__file__).parent.glob(pattern))

    @override
    def open(self, engine: EngineDirectory, options: RunOptions, **own: Any) -> TensorRtExecutor:
        from kvc_trt.backends.tensorrt.running.executor import TensorRtExecutor

        return TensorRtExecutor(engine, **own)

    @override
    def harness(self, engine: EngineDirectory, options: RunOptions) -> TensorRtHarness:
        from kvc_trt.backends.tensorrt.harness import TensorRtHarness

        return TensorRtHarness(engine, options)

    @override
    def benchmark(self, engine: EngineDirectory, options: RunOptions) -> TensorRtBenchmark:
        from kvc_trt.backends.tensorrt.benchmark import TensorRtBenchmark

        return TensorRtBenchmark(engine)

    @override
    def check_verifiable(self, rows: int, what: str) -> None:
        from kvc_trt.backends.tensorrt.harness import check_rows

        check_rows(rows, what)

    @override
    def device_memory(
        self, model: ModelConfig, parameters: PolicyParameters, weights: float, rows: int, gpus: Mapping[str, int]
    ) -> dict[str, Any] | None:
        return device_memory(model, parameters, weights, rows, gpus)


BACKEND = TensorRtBackend()
