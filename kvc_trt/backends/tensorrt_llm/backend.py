"""TensorRT-LLM's engine builder, up to version 1.2: plans for `tensorrt_llm.runtime.Session`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvc_trt.backends.base import Backend
from kvc_trt.backends.probes import Probe
from kvc_trt.backends.tensorrt.building import profiles
from kvc_trt.backends.tensorrt.format import WITH_PLANS, target_problem
from kvc_trt.backends.tensorrt_llm.parts import missing_part

if TYPE_CHECKING:
    from kvc_trt.engine.graph_stages import Makers
    from kvc_trt.engine.resolution.model_choice import ModelSource
    from kvc_trt.engine.resolution.resolved_build import ResolvedBuild
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.progress import Progress


class TensorRtLlmBackend(Backend):
    """Builds engines but does not run them.

    TensorRT 10.14, which builds them, cannot report which outputs of a plan share the buffers of which inputs
    (get_aliased_input_tensor came with 10.15), and a wrongly bound cache would be read while it is written.
    """

    name = "tensorrt-llm"
    purpose = "NVIDIA GPU through TensorRT-LLM 1.2 and older"
    executes = False
    instead = (
        "--backend torch: the same weights and kernels in PyTorch; or kvc-trt export tensorrt-llm, whose "
        "plans tensorrt_llm.runtime.Session and TensorRT load"
    )
    profile_instead = "kvc-trt build --backend tensorrt compiles the same graphs; TensorRT's trtexec times plans alone"
    files = WITH_PLANS
    libraries = ("tensorrt", "tensorrt_llm")
    own_settings = ()
    weight_copies = 3

    @override
    def probe(self) -> Probe:
        """Check the requirements of the tensorrt backend, but accept an older TensorRT, since this one reads no
        graph."""
        from kvc_trt.backends.tensorrt.requirements import probe_machine
        from kvc_trt.backends.tensorrt_llm.builder_api import PACKAGES, probe

        facts, (versions, others) = probe(), probe_machine(PACKAGES)
        missing = (*facts.missing, *map(str, others))
        hints = (*([facts.hint] if facts.hint else []), *(one.hint for one in others))
        found = {**versions, **facts.versions}
        return Probe(self.name, self.purpose, not missing, found, missing, tuple(dict.fromkeys(hints)))

    @override
    def target(self, resolved: ResolvedBuild) -> Mapping[str, Any]:
        """Return the architecture, the packages and the plugin library that the plans are for."""
        from kvc_trt.backends.tensorrt_llm.build import target

        return target(resolved)

    @override
    def target_problem(self, target: Any) -> str | None:
        return target_problem(target, self.name, frozenset({"tensorrt", "tensorrt_llm"}))

    @override
    def missing_part(self, model: ModelConfig) -> str | None:
        return missing_part(model)

    @override
    def makers(self, resolved: ResolvedBuild, source: ModelSource, progress: Progress) -> Makers:
        from kvc_trt.backends.tensorrt_llm.build import makers

        return {**super().makers(resolved, source, progress), **makers(resolved, source, progress)}

    @override
    def sources(self) -> Iterable[Path]:
        """Return the sources of this folder, and of the profiles shared with the tensorrt backend."""
        return (*Path(__file__).parent.glob("*.py"), Path(profiles.__file__))


BACKEND = TensorRtLlmBackend()
