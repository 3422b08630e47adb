from __future__ import annotations

from pathlib import Path

import numpy as np

from kvc_trt import policies
from kvc_trt.contexts.packing import RowPacking
from kvc_trt.engine.program import Program
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.runtime.context import NO_TOKENS, Context, Fingerprint, extended_digest
from tests.backends.onnxruntime.conftest import make_program
from tests.small_model import SMALL

__all__ = ["make_program"]

FINGERPRINT = Fingerprint(*(f"{number}" * 64 for number in range(5)), "small (fp32 weights)", "some policy")
ENGINES = [name for name, _, _ in policies.available() if not name.startswith("exact-topk")]
"""The policies that engines run; the others are oracles of the reference."""


def settings_of(policy: str) -> dict[str, int]:
    """Limits under which every policy evicts or selects on a prompt of 200 tokens."""
    limits = {"token_budget": 64, "max_input_len": 256, "max_output_len": 16}
    return {**limits, "window": 16} if policy == "snapkv" else limits


def packing_without_graphs(policy: str, dtype: str = "float32") -> RowPacking:
    """A packing of a small model; nothing can be run with it."""
    parameters = policies.resolve(policy, model=SMALL, **settings_of(policy))
    none = Path("none")
    program = Program(SMALL, parameters, state_tensors(SMALL, parameters, dtype, turns=True), none, none, none)
    return RowPacking(program, FINGERPRINT)


def random_context(packing: RowPacking, tokens: int, seed: int) -> Context:
    """A context of any bits at all, NaN included, with the lengths of a row after `tokens` tokens."""
    random = np.random.default_rng(seed)
    evicting = packing.limits.evicting
    lengths = [
        tokens if evicts else min(tokens, slots)
        for slots, evicts in zip(packing.limits.capacities, evicting, strict=True)
    ]

    def bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape)) * numpy_dtype(dtype).itemsize
        return np.frombuffer(random.bytes(count), numpy_dtype(dtype)).reshape(shape)

    return Context(
        fingerprint=packing.fingerprint,
        logical_length=tokens,
        cache_lengths=tuple(lengths),
        token_digest=extended_digest(NO_TOKENS, range(tokens)),
        logits=bits("float32", (packing.limits.vocab_size,)),
        tensors={name: bits(dtype, shape) for name, (dtype, shape) in packing.layout(lengths, tokens).items()},
    )
