"""Compile a lowered prefill graph for the CPU, and run it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.openvino.lowering import Array, GraphConstants, Target, lower
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.models.quantisation import BLOCK

if TYPE_CHECKING:
    from onnx import ModelProto


class CompiledGraph:
    """A graph that OpenVINO compiled."""

    def __init__(self, model: ModelProto, constants: GraphConstants, target: Target) -> None:
        """Lower and compile a graph; UnsupportedEnvironment if this OpenVINO cannot."""
        import openvino

        self._constants = constants
        try:
            lowered = lower(model, constants, target)
            self._compiled = openvino.Core().compile_model(lowered, "CPU", _settings(target))
        except (RuntimeError, TypeError, AttributeError) as error:
            raise UnsupportedEnvironment(
                f"openvino {release()} cannot load the {model.graph.name} graph: {_reason(error)}",
                hint="kvc-trt doctor",
            ) from error
        self._request = self._compiled.create_infer_request()
        self._packed = False

    def run(
        self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], expose: Collection[str] = ()
    ) -> dict[str, Array]:
        """Run once on contiguous arrays, write the `outputs`, and return the values of the outputs `expose`.

        UnsupportedEnvironment if the run fails. OpenVINO keeps the memory of the longest run: its `release_memory`
        (2026.4.1) leaves pointers to freed memory where a shape does not change.
        """
        import openvino

        try:
            for name, array in {**inputs, **outputs}.items():
                self._request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
            self._request.infer()
            exposed = {name: self._request.get_tensor(name).data.copy() for name in expose}
        except RuntimeError as error:
            raise UnsupportedEnvironment(
                f"openvino {release()} cannot run the graph: {_reason(error)}",
                hint="take a shorter prompt or a smaller batch, or --backend onnxruntime",
            ) from error
        if not self._packed:  # the first run packs the weights, and reads the file for the last time
            self._constants.release_pages()
            self._packed = True
        return exposed


def release() -> str:
    """Return OpenVINO's release, without the build that follows it."""
    import openvino

    return str(openvino.__version__).partition("-")[0]


def _settings(target: Target) -> dict[str, Any]:
    """Return OpenVINO's settings. Compiled models are never kept on disk."""
    chosen: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": target.precision,
        "KV_CACHE_PRECISION": target.precision,
        # Inputs of quantised matrices are rounded to 8 bits by blocks of this size, as in the operator's body.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(BLOCK),
        "ENABLE_CPU_PINNING": False,  # ONNX Runtime's threads run on the same cores
        "CACHE_DIR": "",
    }
    return chosen if target.threads is None else {**chosen, "INFERENCE_NUM_THREADS": target.threads}


def _reason(error: Exception) -> str:
    """Return the part of an error's text that describes the problem, without the place in OpenVINO's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    listed = [line.removeprefix("-- ") for line in lines if line.startswith("-- ")]  # unconverted operations
    return "; ".join(listed) or (lines[-1] if lines else type(error).__name__)
