"""Measure prefill by OpenVINO and decode by ONNX Runtime on this machine's CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvc_trt.backends.benchmark import PartOfRun
from kvc_trt.backends.onnxruntime.benchmark import OnnxRuntimeBenchmark
from kvc_trt.backends.openvino.executor import OpenVinoExecutor
from kvc_trt.engine.program import Program


class OpenVinoBenchmark(OnnxRuntimeBenchmark):
    """Measures OpenVINO and ONNX Runtime on this machine's processor."""

    @override
    def open(self, program: Program) -> Any:
        return OpenVinoExecutor(program, self._options)

    @override
    def compaction(self, program: Program, prompts: NDArray[np.int64], repeats: int) -> PartOfRun | None:
        """Return None: OpenVINO's profile does not tell which nodes came from which operator."""
        return None
