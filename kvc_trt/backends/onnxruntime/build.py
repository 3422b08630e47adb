"""The stages of an ONNX Runtime engine: one weight file, and the two graphs that read it in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.engine.build import Makers
from kvc_trt.engine.model_choice import ModelSource
from kvc_trt.engine.request import Request
from kvc_trt.engine.targets import WEIGHTS_FILE
from kvc_trt.progress import Progress

if TYPE_CHECKING:
    from onnx import ModelProto


def makers(request: Request, source: ModelSource, progress: Progress) -> Makers:
    """Return what makes each stage's file; onnx is imported when the first graph is made."""

    def weights(path: Path, *, finished: Path) -> None:
        from kvc_trt.graph.weights import write_weights

        length = request.parameters.max_sequence_len
        kind = request.config.weights
        write_weights(request.model, source.weights, path, weights=kind, length=length, progress=progress)

    def prefill(path: Path, *, finished: Path) -> None:
        from kvc_trt.graph.build import build_prefill

        with progress.task("building the prefill graph", None):
            _write_graph(build_prefill, request, path, finished)

    def decode(path: Path, *, finished: Path) -> None:
        from kvc_trt.graph.build import build_decode

        with progress.task("building the decode graph", None):
            _write_graph(build_decode, request, path, finished)

    return {"weights": weights, "prefill": prefill, "decode": decode}


def _write_graph(build: Callable[..., ModelProto], request: Request, path: Path, finished: Path) -> None:
    from kvc_trt.graph.weights import GraphWeights

    model: Any = build(request.model, request.parameters, weights=GraphWeights(finished / WEIGHTS_FILE))
    path.write_bytes(model.SerializeToString(deterministic=True))
