from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvc_trt.contexts.packing import RowPacking
from kvc_trt.engine.program import NO_FILE, Program
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS, FP8, INT8
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.runtime.context import NO_TOKENS, Context, Fingerprint, extended_digest
from tests.every_policy import parameters_of
from tests.small_model import SMALL

FINGERPRINT = Fingerprint(*(f"{number}" * 64 for number in range(5)), "small (fp32 weights)", "some policy")
LARGEST_EXPONENT = 247
"""The largest byte that `fp8` has for the exponent of finite numbers."""


def packing_without_graphs(policy: str, dtype: str = "float32", kv_cache: str = AUTO) -> RowPacking:
    """Return a packing of a small model; nothing can be run with it."""
    parameters = parameters_of(policy, kv_cache=kv_cache)
    program = Program(SMALL, parameters, state_tensors(SMALL, parameters, dtype, turns=True), NO_FILE, NO_FILE, NO_FILE)
    return packing_of(program)


def packing_of(program: Program) -> RowPacking:
    """Return the packing of a program that belongs to no engine."""
    return RowPacking(program, replace(FINGERPRINT, kv_cache=program.parameters.kv_cache))


def random_context(packing: RowPacking, tokens: int, seed: int) -> Context:
    """A context of any numbers at all that an engine can have written, with the lengths of a row after `tokens` tokens.

    Numbers that a tensor cannot hold are 1: NaN, code -128 of int8, scales that are not above 0. So is the largest
    exponent, with which not every code is a float32."""
    random = np.random.default_rng(seed)
    evicting = packing.limits.evicting
    lengths = [
        tokens if evicts else min(tokens, slots)
        for slots, evicts in zip(packing.limits.capacities, evicting, strict=True)
    ]

    def bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape)) * numpy_dtype(dtype).itemsize
        content = np.frombuffer(random.bytes(count), numpy_dtype(dtype)).reshape(shape)
        if content.dtype.kind == "i":
            return content
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(content), content, content.dtype.type(1))

    def stored(name: str, content: np.ndarray) -> np.ndarray:
        kind, form = name.partition(".")[0], CACHE_FORMATS[packing.fingerprint.kv_cache]
        vector = form.keys if kind.startswith("k") else form.values
        if vector is None or kind in ("slot_positions", "scores", "value_sum"):
            return content
        if kind.endswith("_minimum"):
            return content + content.dtype.type(0)  # no -0
        if kind.endswith("_scale"):
            possible = content.view(np.uint8) < LARGEST_EXPONENT if vector == FP8 else content > 0
        else:
            possible = {INT8: content != -128, FP8: content & 0x7F != 0x7F}.get(vector, True)
        return np.where(possible, content, content.dtype.type(1))

    return Context(
        fingerprint=packing.fingerprint,
        logical_length=tokens,
        cache_lengths=tuple(lengths),
        token_digest=extended_digest(NO_TOKENS, range(tokens)),
        logits=bits("float32", (packing.limits.vocab_size,)),
        tensors={
            name: stored(name, bits(dtype, shape)) for name, (dtype, shape) in packing.layout(lengths, tokens).items()
        },
    )
