"""`--dense-until auto`: the length up to which a dense step is at least as fast as a sparse one, on any backend.

A few layers with the model's attention shape and almost no other weights are decoded both ways at growing cache
lengths. The answer depends on the machine, so it is measured once per machine and shape and kept in the cache
directory: building the same engine again must give the same engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvc_trt.engine.manifest import canonical
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_whole
from kvc_trt.files.cache import cache_root
from kvc_trt.files.inputs import read_json_input
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.dimensions import INT32_MAX

if TYPE_CHECKING:
    from kvc_trt.runtime.executor import Executor

_LARGEST_FILE = 64
GROWTH = 1.25
"""The ratio of consecutive lengths that are tried."""
REPEATS = 9
WARM_UP = 3


def remembered(identity: Mapping[str, Any], measure: Callable[[], int]) -> int:
    """Return the value stored for this `identity` (model, constants, machine), or measure and store it."""
    directory = cache_root() / "break-even"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"{hashlib.sha256(canonical(identity)).hexdigest()}.json"
    with contextlib.suppress(InputError):
        kept = read_json_input(path, _LARGEST_FILE)
        if type(kept) is int and 0 <= kept <= INT32_MAX:
            return kept
    measured = measure()
    write_whole(path, f"{measured}\n".encode())
    return measured


def compared(parameters: PolicyParameters, open_form: Callable[[str, PolicyParameters], Executor]) -> int:
    """Measure up to which length in tokens a dense step is not slower than a sparse one; at least the token budget.

    `open_form(name, parameters)` returns an executor with one row of filled caches.
    """
    if parameters.capacity <= parameters.token_budget:
        return parameters.token_budget
    forms = {"sparse": parameters.token_budget, "dense": parameters.capacity}
    sparse, dense = (
        open_form(name, dataclasses.replace(parameters, skip_layers=0, dense_until=until))
        for name, until in forms.items()
    )
    return first_length_won(
        lengths_to_try(parameters),
        lambda length: step_seconds(sparse, length),
        lambda length: step_seconds(dense, length),
    )


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


def attention_only(model: ModelConfig, parameters: PolicyParameters, dtype: str, state_bytes: int) -> ModelConfig:
    """Return a model with this attention and little else, with enough layers for `state_bytes` of caches."""
    itemsize = numpy_dtype(dtype).itemsize
    slot = model.num_key_value_heads * parameters.cache_format.bytes_per_token(model.head_size, itemsize)
    layers = max(1, min(model.num_hidden_layers, state_bytes // (slot * parameters.capacity)))
    narrow: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "vocab_size": 32,
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return dataclasses.replace(model, num_hidden_layers=layers, dtype=dtype, **narrow)


def step_seconds(executor: Executor, length: int) -> float:
    """Return the median seconds of a step of one row that attends to `length` tokens, its own included."""
    token, position = np.zeros(1, np.int64), np.zeros(1, np.int64)
    lengths = np.full((len(executor.limits.capacities), 1), length - 1, np.int64)
    samples = []
    for _ in range(WARM_UP + REPEATS):
        started = time.perf_counter()
        executor.decode(token, position, lengths)
        samples.append(time.perf_counter() - started)
    return median(samples[WARM_UP:])
