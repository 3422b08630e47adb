"""`--dense-until auto`: the length up to which a dense step is at least as fast as a sparse one, measured here.

A few layers of the model's attention shape, with next to no weights around them, are decoded both ways at growing cache
lengths. The answer depends on the machine, so it is measured once per machine and shape and then kept in the cache:
building the same engine again must give the same engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvc_trt.engine.directory import Engine
from kvc_trt.engine.manifest import canonical
from kvc_trt.engine.stages import cache_root
from kvc_trt.engine.targets import DECODE_FILE, WEIGHTS_FILE
from kvc_trt.models.config import ModelConfig
from kvc_trt.policies.parameters import PolicyParameters

if TYPE_CHECKING:
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

GROWTH = 1.25
"""Ratio of neighbouring lengths that are tried."""
REPEATS = 9
WARM_UP = 3
STATE_BYTES = 256 << 20
"""Layers are added until their caches no longer fit a processor's own."""


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
    directory = cache_root() / "break-even"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"{hashlib.sha256(canonical(identity)).hexdigest()}.json"
    try:
        return int(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        pass
    measured = _measure(model, parameters, dtype)
    path.write_bytes(canonical_number(measured))
    return measured


def canonical_number(value: int) -> bytes:
    """Return the stored form of one measurement."""
    return f"{value}\n".encode()


def first_length_won(lengths: list[int], sparse: Callable[[int], float], dense: Callable[[int], float]) -> int:
    """Return the largest of `lengths` at which dense is not slower, or one less than the first if there is none."""
    lost = [length for length in lengths if dense(length) <= sparse(length)]
    return max(lost, default=lengths[0] - 1)


def lengths_to_try(parameters: PolicyParameters) -> list[int]:
    """Return growing lengths from just above the token budget (up to which a step is dense anyway) to the capacity."""
    lengths, length = [], parameters.token_budget + 1
    while length < parameters.capacity:
        lengths.append(length)
        length = max(length + 1, round(length * GROWTH))
    return [*lengths, parameters.capacity]


def _measure(model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
    if parameters.capacity <= parameters.token_budget:
        return parameters.token_budget
    thin = _attention_only(model, parameters, dtype)
    forms = {"sparse": parameters.token_budget, "dense": parameters.capacity}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        executors = {
            form: _executor(root / form, thin, dataclasses.replace(parameters, skip_layers=0, dense_until=until), dtype)
            for form, until in forms.items()
        }
        shared = executors["sparse"].buffers
        executors["dense"].buffers.update(shared)
        return first_length_won(
            lengths_to_try(parameters),
            lambda length: _seconds(executors["sparse"], length, thin.num_hidden_layers),
            lambda length: _seconds(executors["dense"], length, thin.num_hidden_layers),
        )


def _attention_only(model: ModelConfig, parameters: PolicyParameters, dtype: str) -> ModelConfig:
    slot = 2 * model.num_key_value_heads * model.head_size * np.dtype(dtype).itemsize
    layers = max(1, min(model.num_hidden_layers, STATE_BYTES // (slot * parameters.capacity)))
    narrow: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "vocab_size": 32,
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return dataclasses.replace(model, num_hidden_layers=layers, dtype=dtype, **narrow)


def _executor(directory: Path, model: ModelConfig, parameters: PolicyParameters, dtype: str) -> OnnxRuntimeExecutor:
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
    from kvc_trt.config import BuildConfig
    from kvc_trt.graph.build import build_decode
    from kvc_trt.graph.state import state_tensors
    from kvc_trt.graph.weights import GraphWeights, write_weights
    from kvc_trt.models.random_weights import RandomWeights

    directory.mkdir()
    weights = directory / WEIGHTS_FILE
    kind = "fp16" if dtype == "float16" else "fp32"
    write_weights(model, RandomWeights(model, 0), weights, weights=kind, length=parameters.max_sequence_len)
    graph = build_decode(model, parameters, weights=GraphWeights(weights))
    (directory / DECODE_FILE).write_bytes(graph.SerializeToString())
    state = [dataclasses.asdict(tensor) for tensor in state_tensors(model, parameters, dtype)]
    config: dict[str, Any] = {"kv_compression": {"state": state}}
    engine = Engine(directory, config, {}, {}, model, parameters, BuildConfig(model="break-even"))
    executor = OnnxRuntimeExecutor(engine)
    executor.allocate(1)
    generator = np.random.default_rng(0)
    for buffer in executor.buffers.values():
        buffer.reshape(-1)[:] = np.resize(generator.standard_normal(1 << 20).astype(buffer.dtype), buffer.size)
    return executor


def _seconds(executor: OnnxRuntimeExecutor, length: int, layers: int) -> float:
    token, position = np.zeros(1, np.int64), np.zeros(1, np.int64)
    lengths = np.full((layers, 1), length - 1, np.int64)
    samples = []
    for _ in range(WARM_UP + REPEATS):
        started = time.perf_counter()
        executor.decode(token, position, lengths)
        samples.append(time.perf_counter() - started)
    return median(samples[WARM_UP:])
