"""The operators that attend from a prompt's tokens to each other, alone, beside the reference's causal attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvc_trt.backends.harness import Array, EngineOperator
from kvc_trt.backends.run_options import PrefillPrecision
from kvc_trt.methods.base.isolated_runs import Float, float32
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.operators.softmax import SINK_LOGITS
from kvc_trt.reference.dense import causal_attention
from kvc_trt.reference.softmax import PLAIN, Softmax
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.rankings.array_errors import larger, maximum_error
from kvc_trt.verify.rungs.inputs import normal, softmax_of_case


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of KvcPrefillAttention: q [B,H,S,D], k and v [B,G,S,D], S a multiple of the prompt block."""

    name: str
    q: Float
    k: Float
    v: Float
    softmax: Softmax = PLAIN


def attention_cases(
    config: ModelConfig, dtype: str, seed: int, precision: PrefillPrecision = "f32", window: int | None = None
) -> list[AttentionCase]:
    """Return cases of one block of queries, and of several; with a `window`, more tokens than it has.

    If prefill computes in bf16, the inputs hold numbers of that type, because the error of rounding inputs belongs to
    the operator that made them, as in an engine whose caches are bfloat16.
    """
    rng = np.random.default_rng(seed)
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_size
    held, kind = numpy_dtype("bfloat16" if precision == "bf16" else dtype), numpy_dtype(dtype)
    cases = []
    for blocks in (1, 3 if window is None else 2 + window // PROMPT_BLOCK):
        shape = (1, groups, blocks * PROMPT_BLOCK, size)
        q, k, v = (normal(rng, s).astype(held).astype(kind) for s in ((1, heads, *shape[2:]), shape, shape))
        cases.append(AttentionCase(f"{shape[2]} tokens", q, k, v, softmax_of_case(config, seed)))
    return cases


def check_prefill_attention(
    operator: EngineOperator, cases: list[AttentionCase], window: int | None, bar: float
) -> list[Check]:
    """Run the operator on each case; with a `window`, each token sees only the last ones."""
    error = 0.0
    for case in cases:
        error = larger(error, _error(operator, case, window))
    where = f"{operator.nodes} nodes: {', '.join(case.name for case in cases)}"
    return [at_most(f"{operator.name} values", f"{len(cases)} cases", error, bar, note=where)]


def _error(operator: EngineOperator, case: AttentionCase, window: int | None) -> float:
    sinks = {} if case.softmax.sinks is None else {SINK_LOGITS: case.softmax.sinks.numpy().astype(case.k.dtype)}
    (output,) = operator.run(q=case.q, k=case.k, v=case.v, **sinks)
    rows = zip(float32(case.q), float32(case.k), float32(case.v), strict=True)
    expected = torch.stack([causal_attention(*row, window=window, softmax=case.softmax) for row in rows])
    return maximum_error(as_rounded(output), expected.numpy())


def as_rounded(output: Array) -> Array:
    """Return an output as bfloat16 if it was rounded to that type and widened again; otherwise unchanged."""
    rounded = output.astype(numpy_dtype("bfloat16"))
    return rounded if bool((rounded.astype(output.dtype) == output).all()) else output
