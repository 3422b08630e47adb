"""OpenVINO for prefill, ONNX Runtime for decode, on any CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvc_trt.backends.onnxruntime.backend import OnnxRuntimeBackend
from kvc_trt.backends.probes import Probe, import_package

if TYPE_CHECKING:
    from kvc_trt.backends.openvino.benchmark import OpenVinoBenchmark
    from kvc_trt.backends.openvino.executor import OpenVinoExecutor
    from kvc_trt.backends.openvino.harness import OpenVinoHarness
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory

SUPPORTED = "2026.4"
"""The release whose paged attention `paged_attention.py` calls; OpenVINO promises it to no other."""
INSTALL = "pip install 'kvc-trt[openvino]'"


class OpenVinoBackend(OnnxRuntimeBackend):
    """Runs the same graphs and weight formats as ONNX Runtime."""

    name = "openvino"
    purpose = "any CPU; fast prefill, decode by ONNX Runtime"
    automatic = None
    libraries = ("onnxruntime", "openvino")
    runs_programs = False

    @override
    def probe(self) -> Probe:
        """Check for both packages, and for the release of OpenVINO that this code was written for."""
        decode = super().probe()
        versions, missing = import_package("openvino")
        # A version is followed by build numbers: 2026.4.1-22127-...
        versions = {name: version.partition("-")[0] for name, version in versions.items()}
        if versions and not versions["openvino"].startswith(f"{SUPPORTED}."):
            missing = (f"openvino {SUPPORTED}, found {versions['openvino']}",)
        install = (INSTALL,) if missing else ()
        problems = (*missing, *decode.missing)
        return Probe(
            self.name, self.purpose, not problems, {**versions, **decode.versions}, problems, install + decode.install
        )

    @override
    def packed_copies(self, weights: str, size: float, *, drafts: bool) -> tuple[str, ...]:
        """Return the copy of the prefill graph in OpenVINO, and those of ONNX Runtime, which runs the steps."""
        return ("prompts", *super().packed_copies(weights, size, drafts=drafts))

    @override
    def open(self, engine: EngineDirectory, options: RunOptions, **own: Any) -> OpenVinoExecutor:
        from kvc_trt.backends.openvino.executor import OpenVinoExecutor

        return OpenVinoExecutor(engine, options, **own)

    @override
    def harness(self, engine: EngineDirectory, options: RunOptions) -> OpenVinoHarness:
        from kvc_trt.backends.openvino.harness import OpenVinoHarness

        return OpenVinoHarness(engine, options)

    @override
    def benchmark(self, engine: EngineDirectory, options: RunOptions) -> OpenVinoBenchmark:
        from kvc_trt.backends.openvino.benchmark import OpenVinoBenchmark

        return OpenVinoBenchmark(options, engine.model.dtype)


BACKEND = OpenVinoBackend()
