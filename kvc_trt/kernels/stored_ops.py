"""The operators over caches in a format, computed by the reference: every reader of a cache sees the dequantised
values.

Each function takes an operator's inputs and attributes by name, updates state in place, and returns the new outputs.
Attention and votes are those of `reference_ops` over float32 tables of the dequantised vectors; codes are made of new
tokens and of a prompt's survivors, and only moved afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import CompactResult
from kvc_trt.kernels.stored_parts import StoredTables, names_of, parts_of, read_parts
from kvc_trt.models.cache_formats import CacheFormat
from kvc_trt.operators.compaction.compact import STORED_KEYS, STORED_VALUES
from kvc_trt.operators.schema import Tensor as Schema
from kvc_trt.operators.turns.replace import K_KEPT, V_KEPT

Given = Mapping[str, Any]


def compact(form: CacheFormat, given: Given) -> tuple[Tensor, ...]:
    """Keep the tokens of a prompt that exact keys vote for, and store them in the format."""
    exact: CompactResult = reference_ops.compute("compact", given)
    kept = StoredTables.of(exact.k_cache, exact.v_cache, form)
    return _compacted(kept, exact.cache_lengths, exact.indices, given)


def compact_turn(form: CacheFormat, given: Given) -> tuple[Tensor, ...]:
    """Keep the stored and new tokens that the dequantised keys vote for, and move their codes."""
    tables = StoredTables.named(given, form, (STORED_KEYS, STORED_VALUES))
    k, v = tables.read()
    others = _without(given, form, (STORED_KEYS, STORED_VALUES))
    read: CompactResult = reference_ops.compute("compact_turn", {**others, "k": k, "v": v})
    places = read.indices.clamp(min=0).long()[..., None]
    kept = tables.map(lambda part: part.gather(2, places.expand(*places.shape[:3], part.shape[3])))
    return _compacted(kept, read.cache_lengths, read.indices, given)


def append_block(form: CacheFormat, given: Given) -> None:
    """Store a block's tokens at slots cache_lengths[b] and after, in place; those without a slot are dropped."""
    new = StoredTables.of(given["k_new"], given["v_new"], form)
    pairs = zip(new.parts, StoredTables.named(given, form).parts, strict=True)
    reference_ops.append_tables(pairs, given["cache_lengths"], given["lengths"])


def raise_bounds(form: CacheFormat, given: Given) -> None:
    """Raise in place the bounds of the pages in which a block's tokens are stored, to cover their dequantised keys."""
    keys = read_parts(parts_of(given["k_new"], form.keys), form.keys)
    if not given["fp8_bounds"]:
        keys = keys.to(given["k_new"].dtype)
    reference_ops.raise_bounds(**{**given, "k_new": keys})
    _unsigned(given["bounds"])


def join_block(form: CacheFormat, given: Given) -> tuple[Tensor, ...]:
    """Return the parts of stored and new tokens, zero past a row's end, and the rows' lengths."""
    new = StoredTables.of(given["k_new"], given["v_new"], form)
    pairs = zip(new.parts, StoredTables.named(given, form).parts, strict=True)
    return reference_ops.join_tables(pairs, given["cache_lengths"], given["lengths"])


def replace_cache(form: CacheFormat, given: Given) -> None:
    """Overwrite a cache and the positions of its slots, in place."""
    kept = StoredTables.named(given, form, (K_KEPT, V_KEPT))
    for state, part in zip(StoredTables.named(given, form).parts, kept.parts, strict=True):
        state.copy_(part)
    given["slot_positions"].copy_(given["positions_kept"])


def hybrid_attention(form: CacheFormat, given: Given) -> tuple[Tensor, Tensor]:
    """Store a token, then select and attend over the cache's dequantised vectors."""
    output, selected = _step("hybrid_attention", form, given)
    return output, selected


def dense_attention(form: CacheFormat, given: Given) -> Tensor:
    """Store a token, then attend to all that the cache gives back."""
    output: Tensor = _step("dense_attention", form, given)
    return output


def rotated_hybrid_attention(form: CacheFormat, given: Given) -> tuple[Tensor, ...]:
    """`hybrid_attention` behind the rotary embedding; also the query."""
    token = _rotated(given)
    return *hybrid_attention(form, token), token["query"]


def rotated_dense_attention(form: CacheFormat, given: Given) -> tuple[Tensor, ...]:
    """`dense_attention` behind the rotary embedding; also the query."""
    token = _rotated(given)
    return dense_attention(form, token), token["query"]


def _rotated(given: Given) -> dict[str, Any]:
    """Return the arguments of the plain step, with the token rotated."""
    rotation = ("joined", "cosines", "sines", "heads")
    token = reference_ops.rotated_token(*(given[name] for name in rotation))
    rest = {name: value for name, value in given.items() if name not in rotation}
    return {**dict(zip(("query", "k_new", "v_new"), token, strict=True)), **rest}


def _step(operation: str, form: CacheFormat, given: Given) -> Any:
    """Attend to the caches' dequantised vectors by the operation over exact caches, then store the new token in
    them."""
    state, new = StoredTables.named(given, form), StoredTables.of(given["k_new"], given["v_new"], form)
    (keys, values), (k_new, v_new) = state.read(), new.read()
    exact = {"k_new": k_new, "v_new": v_new, "k_cache": keys, "v_cache": values}
    made = reference_ops.compute(operation, {**_without(given, form), **exact})
    for row, slot in enumerate(given["cache_lengths"].tolist()):
        if 0 <= slot < keys.shape[2]:
            for part, entry in zip(state.parts, new.parts, strict=True):
                part[row, :, slot] = entry[row]
    if "bounds" in given:
        _unsigned(given["bounds"])
    return made


def _without(given: Given, form: CacheFormat, tensors: tuple[Schema, Schema] | None = None) -> dict[str, Any]:
    """Return the arguments without the parts of keys and values."""
    keys, values = names_of(form) if tensors is None else names_of(form, tensors)
    return {name: value for name, value in given.items() if name not in {*keys, *values}}


def _compacted(kept: StoredTables, lengths: Tensor, indices: Tensor, given: Given) -> tuple[Tensor, ...]:
    """Return the outputs of a compaction: parts with zeros in free slots, bounds of their dequantised keys, lists."""
    free = indices[..., None] < 0
    cleared = kept.map(lambda part: part.masked_fill(free, 0))
    dtype: torch.dtype = given["q_window"].dtype
    page_size, fp8_bounds = given["page_size"], given["fp8_bounds"]
    bounds = reference_ops.bounds_of(cleared.read()[0], lengths, page_size, dtype, fp8_bounds)
    _unsigned(bounds)
    return *cleared.parts, bounds, lengths, indices


def _unsigned(bounds: Tensor) -> None:
    """Make -0 to 0, in place: codes are often 0, and executors differ in the sign of the maximum of 0 and -0."""
    if bounds.is_floating_point():
        bounds.add_(0.0)
