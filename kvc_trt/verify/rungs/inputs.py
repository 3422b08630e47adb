"""Inputs for single operators at an engine's own constants: random ones, and ones built so that scores tie exactly.

On the tying ones a higher index in place of a lower one is wrong even if rounding explains it: equal columns of the
executor's matrix products give equal scores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvc_trt.methods.base.isolated_runs import Float, Int64, PromptCase, StepCase
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.policies import PolicyParameters
from kvc_trt.reference.softmax import Softmax

_LONGEST_PROMPT, _MOST_SLOTS = 4096, 4096
"""The sizes of a case if nothing depends on them, small enough for a quick check of an engine for 128K tokens."""
_MOST_ELEMENTS = 1 << 26
"""The most elements of one cache in a case, if rows can be divided among cases."""


def softmax_of_case(config: ModelConfig, seed: int) -> Softmax:
    """Return a random softmax of the model's form; sinks are as large as logits, in the types that engines have."""
    cap, heads = config.description.attention_softcap, config.num_attention_heads
    if not config.description.attention_sinks:
        return Softmax(cap)
    drawn = np.random.default_rng([seed, heads]).standard_normal(heads)
    return Softmax(cap, torch.from_numpy(drawn.astype(numpy_dtype("bfloat16")).astype(np.float32)))


def prompt_cases(config: ModelConfig, parameters: PolicyParameters, dtype: str, seed: int) -> Iterator[PromptCase]:
    """Yield prompts around every border of the rule: shorter than the window, just kept whole, one longer, and long."""
    budget, evicts = parameters.prompt_budget, parameters.eviction.evicts
    longest = min(parameters.max_input_len, max(_LONGEST_PROMPT, 2 * budget if evicts else 0))
    slots = -(-longest // PROMPT_BLOCK) * PROMPT_BLOCK
    window = min(parameters.window, slots)  # heavy hitters look at all queries of the longest prompt that is served
    whole = min(parameters.longest_whole, longest)
    short = {min(parameters.long_prompt, longest)} if parameters.long_prompt else set()
    lengths = sorted({max(1, window // 3), whole, min(whole + 1, longest), longest, *short})
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_size
    shape = (len(lengths), groups, slots, size)
    for name in ("random", "repeated keys", "equal keys"):
        rng = np.random.default_rng([seed, len(name)])
        q_window = normal(rng, (len(lengths), heads, window, size))
        values = normal(rng, shape)
        if name == "random":
            keys = normal(rng, shape)
        elif name == "equal keys":
            keys = np.broadcast_to(normal(rng, (1, groups, 1, size)), shape)
        else:
            keys = repeated(rng, shape, run=1, distinct=max(2, longest // 7))
        q_window, keys, values = (np.ascontiguousarray(one, numpy_dtype(dtype)) for one in (q_window, keys, values))
        made, softmax = (q_window, keys, values, np.array(lengths, np.int64)), softmax_of_case(config, seed)
        yield PromptCase(name, name != "random", *made, softmax=softmax)


def step_cases(config: ModelConfig, parameters: PolicyParameters, dtype: str, seed: int) -> Iterator[StepCase]:
    """Yield steps at every border: rows that just fit, one over, a page boundary, and the last free slot.

    Rows of a case share a batch. If caches are very long, each row gets its own case, only the shortest and the longest
    of each kind.
    """
    capacity = _step_slots(parameters)
    limit = min(parameters.dense_limit, capacity)
    over = sorted({min(limit + 1, capacity), min(limit + parameters.page_size + 1, capacity), capacity})
    mixed = sorted({max(1, parameters.page_size - 1), limit, *over})
    kinds = {"random": mixed, "all rows fit": [1, max(1, limit // 2), limit]}
    if limit < capacity:
        kinds |= {"opposed heads": over, "repeated pages": over, "zero query": over}
    row_elements = config.num_key_value_heads * capacity * config.head_size
    for name, lengths in kinds.items():
        together = len(lengths) * row_elements <= _MOST_ELEMENTS
        for rows in [lengths] if together else [lengths[:1], lengths[-1:]]:
            yield _step_case(name, config, parameters, dtype, seed, np.array(rows, np.int64))


def _step_case(
    name: str, config: ModelConfig, parameters: PolicyParameters, dtype: str, seed: int, lengths: Int64
) -> StepCase:
    rng = np.random.default_rng([seed, len(name), *([] if len(lengths) > 1 else lengths)])
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_size
    batch, shape = len(lengths), (len(lengths), groups, _step_slots(parameters), size)
    query = normal(rng, (batch, heads, size))
    keys, values = normal(rng, shape), normal(rng, shape)
    if name == "zero query":
        query[:] = 0
    elif name == "opposed heads":
        query *= np.where(np.arange(heads) % 2, -1, 1)[:, None]
    elif name == "repeated pages":
        pages = -(-shape[2] // parameters.page_size)
        keys = repeated(rng, shape, run=parameters.page_size, distinct=max(2, pages // 5))
    empty = np.arange(shape[2]) >= (lengths - 1)[:, None]
    for cache in (keys, values):
        cache[np.broadcast_to(empty[:, None, :], shape[:3])] = 0
    k_new, v_new = normal(rng, (batch, groups, size)), normal(rng, (batch, groups, size))
    ties = name in ("zero query", "repeated pages")
    kind = numpy_dtype(dtype)
    query, k_new, v_new = (np.ascontiguousarray(array, kind) for array in (query, k_new, v_new))
    keys, values = (np.ascontiguousarray(array, kind) for array in (keys, values))
    return StepCase(name, ties, query, k_new, v_new, keys, values, lengths - 1, softmax_of_case(config, seed))


def enough_slots(parameters: PolicyParameters) -> int:
    """Return enough cache slots to reach every branch, for bodies that read the number of slots from the cache."""
    return min(parameters.capacity, max(_MOST_SLOTS, 2 * min(parameters.dense_limit, parameters.capacity)))


def _step_slots(parameters: PolicyParameters) -> int:
    """Return the cache slots for testing steps: the engine's own number for steps that choose, whose bodies have it."""
    chooses = parameters.reads_a_part or parameters.evicts_while_decoding
    return parameters.capacity if chooses else enough_slots(parameters)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Float:
    """Return standard normal numbers, float32."""
    return rng.standard_normal(shape, dtype=np.float32)


def repeated(rng: np.random.Generator, shape: tuple[int, ...], *, run: int, distinct: int) -> Float:
    """Return random keys in which each run of `run` slots is a copy of one of `distinct` runs."""
    batch, groups, slots, size = shape
    runs = normal(rng, (batch, groups, distinct, run, size))
    picks = rng.integers(distinct, size=(batch, groups, -(-slots // run)))
    chosen = np.take_along_axis(runs, picks[:, :, :, None, None], axis=2).reshape(batch, groups, -1, size)
    copied: Float = chosen[:, :, :slots].copy()
    return copied
