"""What `--dense-until auto` measures in ONNX Runtime: graphs of a few layers, run on this processor."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvc_trt.backends.break_even import attention_only, compared, remembered
from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.engine.program import Program
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig

if TYPE_CHECKING:
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

STATE_BYTES = 256 << 20
"""Caches that no longer fit a processor's own."""


def break_even(model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
    """Return the length in tokens up to which attending densely is at least as fast; from the cache if known."""
    import onnxruntime

    identity = {
        "model": dataclasses.asdict(model),
        "parameters": dataclasses.asdict(parameters),
        "dtype": dtype,
        "onnxruntime": onnxruntime.__version__,
        "cores": os.cpu_count(),
    }
    return remembered(identity, lambda: _measure(model, parameters, dtype))


def _measure(model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
    thin = attention_only(model, parameters, dtype, STATE_BYTES)
    shared: dict[str, Any] = {}

    def open_form(name: str, form: PolicyParameters) -> OnnxRuntimeExecutor:
        executor = _executor(root / name, thin, form, dtype)
        executor.buffers.update(shared)  # one set of caches serves both forms
        shared.update(executor.buffers)
        return executor

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        return compared(parameters, open_form)


def _executor(directory: Path, model: ModelConfig, parameters: PolicyParameters, dtype: str) -> OnnxRuntimeExecutor:
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
    from kvc_trt.graph.build import build_decode
    from kvc_trt.graph.state import state_tensors
    from kvc_trt.graph.weights import GraphWeights, write_weights
    from kvc_trt.models.random_weights import RandomWeights

    directory.mkdir()
    weights = directory / WEIGHTS_FILE
    kind = "fp16" if dtype == "float16" else "fp32"
    write_weights(model, RandomWeights(model, 0), weights, weights=kind, length=parameters.max_sequence_len)
    graph = build_decode(model, parameters, weights=GraphWeights(weights))
    state = state_tensors(model, parameters, dtype)
    executor = OnnxRuntimeExecutor(
        Program(model, parameters, state, weights, prefill=lambda: graph, decode=lambda: graph)
    )
    executor.allocate(1)
    generator = np.random.default_rng(0)
    for buffer in executor.buffers.values():
        buffer.reshape(-1)[:] = np.resize(generator.standard_normal(1 << 20).astype(buffer.dtype), buffer.size)
    return executor
