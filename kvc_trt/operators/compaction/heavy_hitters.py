"""KvcCompactHeavyHitters: keep the last tokens of a prompt and the others that received the most attention.

Source: H2O (arXiv 2306.14048), section 4; exact rule in docs/policies/. Probabilities are summed block by block over
the queries: memory is linear in the prompt's length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.operators.attention.heavy_hitter_attention import RECENT, SCORES, SLOT_POSITIONS
from kvc_trt.operators.attention.prefill_attention import future_of_block, weights_of_block
from kvc_trt.operators.compaction.beside_recent import keep_beside_recent
from kvc_trt.operators.compaction.scored import compaction
from kvc_trt.operators.schema import CACHE, Tensor
from kvc_trt.operators.shapes import attention_scale, float32, scalar, size
from kvc_trt.operators.vectors import Tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _received(emit: Emitter, tables: Tables) -> Value:
    """Return the attention each token receives from all queries of its row, summed over the group; FLOAT [B,G,S].

    S is a multiple of PROMPT_BLOCK; the keys are always exact."""
    heads = emit.Concat([0], size(emit, "k", 1), [-1], size(emit, "q", 2), size(emit, "q", 3), axis=0)
    query = emit.Reshape(emit.Mul(float32(emit, "q"), attention_scale(emit, "q", 3)), heads)
    keys, block_mask = float32(emit, "k"), future_of_block(emit)
    rows = emit.Reshape("prompt_lengths", [-1, 1, 1, 1, 1])
    length = size(emit, "k", 2)
    last = emit.Sub(scalar(emit, emit.Div(length, PROMPT_BLOCK)), 1)

    def block(body: Emitter, iteration: Value, total: Value) -> Value:
        # From the last block to the first: the first needs most memory and the others reuse it (see prefill attention).
        index = body.Sub(last, iteration)
        weights, _, end = weights_of_block(body, query, keys, block_mask, index)
        query_positions = body.Add(body.Range(0, PROMPT_BLOCK, 1), body.Mul(index, PROMPT_BLOCK))
        real = body.Less(body.Unsqueeze(query_positions, [1]), rows)
        paid = body.ReduceSum(body.Where(real, weights, 0.0), [2, 3], keepdims=0)
        padding = body.Concat([0], body.Sub(length, end), axis=0)
        return str(body.Add(total, body.Pad(paid, padding, 0.0, [2])))

    nothing = emit.Expand(np.zeros((1, 1, 1), np.float32), emit.Shape("k", end=3))
    return emit.accumulate(emit.Add(last, 1), nothing, block)


COMPACT_HEAVY_HITTERS = compaction(
    "KvcCompactHeavyHitters",
    "Keep the last tokens of a prompt, and of the others those that received most attention.",
    keep_beside_recent(_received),
    inputs=(Tensor("q", CACHE, ("B", "H", "S", "D"), "after RoPE"),),
    state=(SCORES, SLOT_POSITIONS),
    extra=(RECENT,),
)
