"""The content and order of a weight file: a plan for each tensor, which is read from a source when it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.quantisation import BLOCK, BlockSource, quantised_chunks
from kvc_trt.models.rope import rotary_tables
from kvc_trt.models.sources.fp8 import FP8, Fp8Source
from kvc_trt.models.sources.safetensors_file import TensorPlan
from kvc_trt.models.weights import WeightSource, expected_tensors, row_chunks

Precision = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "keep"]
FLOAT_PRECISIONS: dict[str, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}
"""Type of activations and of all tensors that are not fp8 matrices, by weight format."""
QUANTISED_BITS: dict[str, int] = {"int8": 8, "int4": 4}
PRECISIONS = (*FLOAT_PRECISIONS, *QUANTISED_BITS)
KEEP = "keep"
"""A checkpoint's own blocks (GGUF, AWQ, GPTQ): the bits differ from matrix to matrix, and some have offsets."""
TABLE_BITS = 8
"""Bits of a quantised engine's embedding table, which is also the head of a tied model (docs/decisions/0016)."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROTARY = "rotary."
"""The beginning of the names of rotary tables."""
PACKED, SCALES, OFFSETS = ".packed", ".scales", ".offsets"
_MATRIX = re.compile(r".*_proj\.weight|lm_head\.weight")


def activation_dtype(precision: str) -> str:
    """Return the type of activations and cache for a weight format; quantised models compute in float32."""
    if precision not in (*PRECISIONS, KEEP):
        raise InputError(f"--weights {precision}: expected one of {', '.join((*PRECISIONS, KEEP))}")
    return FLOAT_PRECISIONS.get(precision, "float32")


def rotary_names(own_base: float | None) -> tuple[str, str]:
    """Return the names of the cosines and sines of the model's rotary embedding, or of layers with a base of theirs."""
    own = "" if own_base is None else f"{own_base!r}."
    return f"{ROTARY}{own}cos", f"{ROTARY}{own}sin"


def rotary_plans(config: ModelConfig, length: int) -> list[TensorPlan]:
    """Return plans for the cosines and sines of every position, float32 [length, D/2] each."""
    shape = (length, config.head_size // 2)

    def plan(name: str, base: float | None, part: int) -> TensorPlan:
        return TensorPlan(name, "float32", shape, lambda: rotary_tables(config, length, own_base=base)[part])

    bases = (None, *config.rotary_bases)
    return [plan(name, base, part) for base in bases for part, name in enumerate(rotary_names(base))]


def weight_plans(config: ModelConfig, source: WeightSource, weights: str) -> list[TensorPlan]:
    """Return plans for every tensor of the model; InputError for fp8 or blocks from a source that has none."""
    if weights == KEEP:
        return kept_plans(config, source)
    in_fp8 = source if weights == "fp8" and isinstance(source, Fp8Source) else None
    if weights == "fp8" and in_fp8 is None:
        raise InputError("--weights fp8: the checkpoint has no matrix in fp8", hint="--weights bf16")
    dtype, bits = activation_dtype(weights), QUANTISED_BITS.get(weights)
    plans: list[TensorPlan] = []
    for group in _neighbours(config):
        if bits is not None and group[0] == EMBEDDING:
            plans += _quantised_plans(source, EMBEDDING, TABLE_BITS)
        elif bits is not None and _MATRIX.fullmatch(group[0]):
            pairs = [_quantised_plans(source, name, bits) for name in group]
            plans += [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        elif in_fp8 is not None and _MATRIX.fullmatch(group[0]):
            plans += _fp8_plans(in_fp8, group, dtype)
        else:
            plans += [_float_plan(source, name, dtype) for name in group]
    return plans


def kept_plans(config: ModelConfig, source: WeightSource) -> list[TensorPlan]:
    """Return plans that keep a checkpoint's blocks; InputError for a matrix whose blocks an engine cannot hold exactly.

    Matrices of floats, norms and biases become float32, which is exact as well.
    """
    if not isinstance(source, BlockSource):
        raise InputError(
            "--weights keep: the checkpoint has no blocks to keep; expected a GGUF file, or matrices in AWQ or GPTQ of "
            "a family that neither joins, renames nor reorders its tensors",
            hint="--weights int4",
        )
    plans: list[TensorPlan] = []
    for group in _neighbours(config):
        parts = [_kept_tensor_plans(source, name) for name in group]
        plans += [plan for place in zip_longest(*parts) for plan in place if plan is not None]
    return plans


def _kept_tensor_plans(source: BlockSource, name: str) -> list[TensorPlan]:
    """Plan a tensor's levels, scales and offsets from one pass over it; or the tensor in float32."""
    bits, shape = source.block_bits(name), source.shape(name)
    if bits is None:
        return [_float_plan(source, name, "float32")]
    rows, blocks = shape[0], shape[1] // BLOCK
    kept: dict[str, list[NDArray[Any]]] = {SCALES: [], OFFSETS: []}

    def packed() -> Iterator[NDArray[np.uint8]]:
        for start, stop in row_chunks(shape):
            levels, scales, offsets = source.read_blocks(name, start, stop)
            kept[SCALES].append(scales)
            if offsets is not None:
                kept[OFFSETS].append(offsets)
            yield levels

    plans = [
        TensorPlan(name + PACKED, "uint8", (rows, blocks, BLOCK * bits // 8), packed),
        TensorPlan(name + SCALES, "float16", (rows, blocks), lambda: kept.pop(SCALES)),
    ]
    if source.has_offsets(name):
        plans.append(TensorPlan(name + OFFSETS, "float32", (rows, blocks), lambda: kept.pop(OFFSETS)))
    return plans


def _neighbours(config: ModelConfig) -> list[list[str]]:
    """Return all tensors of the file in order; those in one list must be adjacent."""
    groups: dict[str, list[str]] = {}
    for name in expected_tensors(config):
        shared = re.sub(r"\.[qkv]_proj\.", ".qkv.", re.sub(r"\.(gate|up)_proj\.", ".gate_up.", name))
        groups.setdefault(shared, []).append(name)
    return list(groups.values())


def _float_plan(source: WeightSource, name: str, dtype: str) -> TensorPlan:
    shape = tuple(source.shape(name))

    def make() -> Iterator[NDArray[Any]]:
        for start, stop in row_chunks(shape):
            rows = source.read_rows(name, start, stop)
            with np.errstate(over="ignore"):
                converted = rows.astype(numpy_dtype(dtype), copy=False)
            if not np.isfinite(converted.astype(np.float32, copy=False)).all():
                raise _not_stored(name, rows, converted, start)
            yield converted

    return TensorPlan(name, dtype, shape, make)


def _not_stored(name: str, rows: NDArray[Any], converted: NDArray[Any], start: int) -> InputError:
    """Return the error for `rows`, from row `start` on, of which `converted` has values that are not finite."""
    wide = rows.astype(np.float32, copy=False)
    bad = ~np.isfinite(wide)
    fits = not bad.any()
    if fits:
        bad = ~np.isfinite(converted.astype(np.float32, copy=False))
    first = np.argwhere(bad)[0]
    place = (int(first[0]) + start, *map(int, first[1:]))
    found = f"the first of {int(bad.sum())} is {wide[tuple(first)]:g} at {list(place)}"
    if not fits:
        return InputError(f"{name}: contains NaN or infinite weights; {found}")
    return InputError(
        f"{name}: has weights outside the range of {converted.dtype}; {found}", hint="--weights fp32, bf16 or int8"
    )


def _quantised_plans(source: WeightSource, name: str, bits: int) -> tuple[TensorPlan, TensorPlan]:
    """Plan packed values and scales from one pass over the tensor; the scales are kept until they are written."""
    rows, columns = source.shape(name)
    blocks = columns // BLOCK
    kept: dict[str, list[NDArray[np.float16]]] = {SCALES: []}

    def packed() -> Iterator[NDArray[np.uint8]]:
        for values, scales in quantised_chunks(source, name, bits):
            kept[SCALES].append(scales)
            yield values

    return (
        TensorPlan(name + PACKED, "uint8", (rows, blocks, BLOCK * bits // 8), packed),
        TensorPlan(name + SCALES, "float16", (rows, blocks), lambda: kept.pop(SCALES)),
    )


def _fp8_plans(source: Fp8Source, group: list[str], dtype: str) -> list[TensorPlan]:
    """Plan the fp8 matrices as stored, then the scales of their rows; other matrices in `dtype`."""
    matrices = [name for name in group if name in source.matrices]
    return [
        *(_fp8_plan(source, name) for name in matrices),
        *(
            TensorPlan(name + SCALES, "float32", source.shape(name)[:1], lambda name=name: source.row_scales(name))  # type: ignore[misc]
            for name in matrices
        ),
        *(_float_plan(source, name, dtype) for name in group if name not in source.matrices),
    ]


def _fp8_plan(source: Fp8Source, name: str) -> TensorPlan:
    shape = tuple(source.shape(name))

    def make() -> Iterator[NDArray[Any]]:
        for start, stop in row_chunks(shape):
            yield source.read_fp8_rows(name, start, stop)

    return TensorPlan(name, FP8, shape, make)
