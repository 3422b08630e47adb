"""Caches filled without a prefill, so that decode can be timed at lengths whose prefill would take minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.dtypes import numpy_dtype

if TYPE_CHECKING:
    from kvc_trt.graph.state import CacheSite, StateTensor
    from kvc_trt.methods.parameters import PolicyParameters

Array = NDArray[Any]


def cache_rows(sites: Sequence[CacheSite], state: Sequence[StateTensor], entries: Sequence[int]) -> dict[str, Array]:
    """One row of every state tensor: `entries[cache]` random keys and values, and what goes with them.

    Layers and rows of one shape hold the same numbers: a step's time depends on how many there are, not on which.
    What is derived from keys and values is really derived from them, so that pages and tokens differ in score.
    """
    made: dict[tuple[object, ...], dict[str, Array]] = {}
    rows: dict[str, Array] = {}
    for site in sites:
        tensors = {tensor.name.partition(".")[0]: tensor for tensor in state if tensor.cache == site.cache}
        count = entries[site.cache]
        identity = (tensors["k_cache"].shape, count, site.parameters)
        if identity not in made:
            made[identity] = _row(tensors, count, site.parameters)
        rows.update({tensor.name: made[identity][kind] for kind, tensor in tensors.items()})
    return rows


def _row(tensors: Mapping[str, StateTensor], count: int, rule: PolicyParameters) -> dict[str, Array]:
    """One cache's tensors, by their kind."""
    keys, values = (_entries(tensors[kind], count, seed) for seed, kind in enumerate(("k_cache", "v_cache")))
    others = rule.selection.state_of(keys[None], values[None], np.array([count]), rule)
    return {"k_cache": keys, "v_cache": values, **{kind: rows[0] for kind, rows in others.items()}}


def _entries(tensor: StateTensor, count: int, seed: int) -> Array:
    heads, slots, size = tensor.shape
    values = np.zeros((heads, slots, size), numpy_dtype(tensor.dtype))
    values[:, :count] = np.random.default_rng(seed).standard_normal((heads, count, size), np.float32)
    return values
