"""The least time of a decode step: the bytes that it must read, over this machine's memory bandwidth."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.peers.contenders import NEW_TOKENS, TOKEN_BUDGET
from benchmarks.peers.points import Measurement
from kvc_trt import policies
from kvc_trt.backends.host_memory import measure_copy_bandwidth
from kvc_trt.profile.floor import StepCost, floor_seconds
from kvc_trt.profile.model_size import token_cache_bytes, weight_bytes
from kvc_trt.profile.traffic import full_cache_bytes, row_traffic

_READ_FLOATS = 1 << 27
_REPEATS = 15


def bandwidths(threads: int) -> dict[str, float]:
    """Measure bytes per second: of a copy (read and written bytes together) and of reading alone."""
    copy = measure_copy_bandwidth(threads)
    return {"copy_bytes_per_second": copy.median, "read_bytes_per_second": _read_bandwidth(threads)}


def _read_bandwidth(threads: int) -> float:
    """Return the best rate at which each thread reads its part of one large buffer once.

    A dot product reads nearly as fast as the memory gives; a sum is limited by its additions. The best rate, since a
    floor that a run can beat is none: on a shared host the memory gives now more, now less.
    """
    parts = np.array_split(np.ones(_READ_FLOATS, np.float32), threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_REPEATS):
            started = time.perf_counter()
            list(pool.map(np.dot, parts, parts))
            rates.append(4 * _READ_FLOATS / (time.perf_counter() - started))
    return max(rates)


def step_cost(measurement: Measurement) -> StepCost:
    """Return the bytes that one step reads: the weights in kvc-trt's formats, the cache in the contender's own."""
    point, contender = measurement.point, measurement.contender
    model = point.shape.model
    weights = weight_bytes(model, point.weights).per_step
    if contender.reads == "rocketkv":
        parameters = policies.resolve(
            contender.policy or "rocketkv", model=model, token_budget=TOKEN_BUDGET, max_input_len=point.context,
            max_output_len=NEW_TOKENS, kv_cache=contender.cache,
        )  # fmt: skip
        return StepCost(weights, row_traffic(model, parameters, int(contender.cache_bytes), point.context).bytes)
    if contender.ours:
        return StepCost(weights, full_cache_bytes(model, point.context, int(contender.cache_bytes), contender.cache))
    tokens = point.context if contender.reads == "all" else TOKEN_BUDGET
    return StepCost(weights, model.num_hidden_layers * tokens * token_cache_bytes(model, int(contender.cache_bytes)))


def floor_ms(measurement: Measurement, bandwidth: dict[str, Any]) -> float:
    """Return the floor of one step in milliseconds by the faster of the two bandwidths."""
    return 1e3 * floor_seconds(step_cost(measurement), measurement.point.batch, max(bandwidth.values()))
