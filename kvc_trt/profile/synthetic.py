"""Caches filled without a prefill, so that decode can be timed at lengths whose prefill would take minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.dtypes import numpy_dtype

if TYPE_CHECKING:
    from kvc_trt.graph.state import StateTensor

_SEED = 0
Array = NDArray[Any]


def cache_rows(state: Sequence[StateTensor], entries: Sequence[int], page_size: int) -> dict[str, Array]:
    """One row of every state tensor: `entries[cache]` random keys and values, and what goes with them.

    Layers and rows of one shape hold the same numbers: a step's time depends on how many there are, not on which.
    What is derived from keys and values is really derived from them, so that pages and tokens differ in score.
    """
    templates: dict[tuple[object, ...], Array] = {}
    rows: dict[str, Array] = {}
    for tensor in state:
        kind, _, cache = tensor.name.partition(".")
        count = entries[tensor.cache]
        identity = (kind, tensor.shape, count)
        if identity not in templates:
            templates[identity] = _row(kind, tensor, count, rows, cache, page_size)
        rows[tensor.name] = templates[identity]
    return rows


def _row(kind: str, tensor: StateTensor, count: int, rows: Mapping[str, Array], cache: str, page_size: int) -> Array:
    """One tensor; `rows` has the keys and values of its cache already."""
    match kind:
        case "bounds":
            return _bounds(rows[f"k_cache.{cache}"], tensor, count, page_size)
        case "channels":
            return np.ascontiguousarray(rows[f"k_cache.{cache}"].transpose(0, 2, 1))
        case "value_sum":
            total: Array = rows[f"v_cache.{cache}"].sum(axis=1, dtype=np.float32)
            return total
        case "scores":
            return _filled(tensor, np.random.default_rng(_SEED).random(count, np.float32))
        case "slot_positions":
            return _filled(tensor, np.arange(count))
        case _:
            return _entries(kind, tensor, count)


def _filled(tensor: StateTensor, values: Array) -> Array:
    """One number per slot [G,C], the same for every head; empty slots hold the fill value."""
    row = np.full(tensor.shape, tensor.fill, numpy_dtype(tensor.dtype))
    row[:, : len(values)] = values
    return row


def _entries(kind: str, tensor: StateTensor, count: int) -> Array:
    heads, slots, size = tensor.shape
    values = np.zeros((heads, slots, size), numpy_dtype(tensor.dtype))
    generator = np.random.default_rng((_SEED, kind == "v_cache"))
    values[:, :count] = generator.standard_normal((heads, count, size), np.float32)
    return values


def _bounds(keys: Array, tensor: StateTensor, count: int, page_size: int) -> Array:
    """Page maxima of K and of -K, channel-major [G,2D,P]; empty pages hold the fill value."""
    heads, _, size = keys.shape
    pages = tensor.shape[2]
    signed = np.full((heads, pages * page_size, 2 * size), tensor.fill, numpy_dtype(tensor.dtype))
    signed[:, :count, :size] = keys[:, :count]
    signed[:, :count, size:] = -keys[:, :count]
    maxima: Array = signed.reshape(heads, pages, page_size, 2 * size).max(axis=2)
    return np.ascontiguousarray(maxima.transpose(0, 2, 1))
