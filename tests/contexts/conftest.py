from __future__ import annotations

import numpy as np

from kvc_trt.contexts.packing import RowPacking
from kvc_trt.engine.program import NO_FILE, Program
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.runtime.context import NO_TOKENS, Context, Fingerprint, extended_digest
from tests.every_policy import parameters_of
from tests.small_model import SMALL

FINGERPRINT = Fingerprint(*(f"{number}" * 64 for number in range(5)), "small (fp32 weights)", "some policy")


def packing_without_graphs(policy: str, dtype: str = "float32") -> RowPacking:
    """A packing of a small model; nothing can be run with it."""
    parameters = parameters_of(policy)
    program = Program(SMALL, parameters, state_tensors(SMALL, parameters, dtype, turns=True), NO_FILE, NO_FILE, NO_FILE)
    return RowPacking(program, FINGERPRINT)


def random_context(packing: RowPacking, tokens: int, seed: int) -> Context:
    """A context of any numbers at all, with the lengths of a row after `tokens` tokens; none of them is NaN."""
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

    return Context(
        fingerprint=packing.fingerprint,
        logical_length=tokens,
        cache_lengths=tuple(lengths),
        token_digest=extended_digest(NO_TOKENS, range(tokens)),
        logits=bits("float32", (packing.limits.vocab_size,)),
        tensors={name: bits(dtype, shape) for name, (dtype, shape) in packing.layout(lengths, tokens).items()},
    )
