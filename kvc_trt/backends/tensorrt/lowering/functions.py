"""Function bodies go: with them a missing plugin silently becomes a hundred slow layers, without it is an error."""

from __future__ import annotations

from onnx import ModelProto

from kvc_trt.backends.tensorrt.lowering.target import Target


def drop_functions(model: ModelProto, target: Target) -> list[str]:
    """Remove every model-local function. The artefact on disk keeps them: they are the program of other executors."""
    dropped = [body.name for body in model.functions]
    del model.functions[:]
    return [f"dropped the body of {name}" for name in dropped]
