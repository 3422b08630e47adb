"""KvcPrefillAttention as OpenVINO's paged attention, the one fused causal attention that its CPU plugin has.

The operator reads keys and values from a cache in blocks, so one layer's cache lives while its node runs: memory stays
linear in the prompt's length. Each row of a batch is a sequence of its own, padding included, which is causal and
therefore never reaches a real token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from openvino import Node, Output

BLOCK = 32
"""Tokens of a block of the cache; the plugin takes no other number."""
_HEAD_SIZE_STEP = 16
"""The plugin's products need head sizes that are multiples of this."""


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one model's attention."""

    heads: int
    kv_heads: int
    head_size: int
    plain_softmax: bool = True
    """False if logits have a cap or sinks."""

    @property
    def supported(self) -> bool:
        """True if paged attention takes them; otherwise the operator's body runs."""
        return self.plain_softmax and self.head_size % _HEAD_SIZE_STEP == 0


def paged_attention(query: Output, key: Output, value: Output, heads: AttentionHeads, stored: str) -> Output:
    """Return causal attention [B,H,S,D] of `query` [B,H,S,D] to `key`, `value` [B,G,S,D]; S is a multiple of BLOCK.

    `stored` is the type in which the graph computes, "f32" or "bf16"; the blocks must have it.
    """
    from openvino import opset13 as op
    from openvino.op import _PagedAttentionExtension

    size = heads.head_size
    shape = op.shape_of(key, "i32")
    rows, tokens = (op.gather(shape, _int32(axis), _int32(0)) for axis in (0, 2))
    blocks_of_row = op.divide(tokens, _int32(BLOCK))
    blocks = op.multiply(rows, blocks_of_row)
    ends = op.range(_int32(0), op.add(rows, _int32(1)), _int32(1), "i32")
    cache = op.concat([op.unsqueeze(blocks, _int32(0)), _int32([heads.kv_heads, BLOCK, size])], 0)
    # Two buffers need two constants: equal nodes become one.
    buffers = [op.broadcast(op.convert(op.constant(np.float32(fill)), stored), cache) for fill in (0, 1)]
    inputs: list[Node] = [
        _by_token(query, heads.heads * size),
        _by_token(key, heads.kv_heads * size),
        _by_token(value, heads.kv_heads * size),
        *buffers,
        op.broadcast(_int32(0), op.unsqueeze(rows, _int32(0))),  # tokens stored before
        op.multiply(ends, tokens),  # where each row begins
        op.range(_int32(0), blocks, _int32(1), "i32"),  # the blocks of all rows
        op.multiply(ends, blocks_of_row),  # where each row's blocks begin
        op.constant(np.float32(size**-0.5)),
        _int32(0),  # sliding window
        _empty(np.float32),  # slopes of linear biases
        tokens,  # longest context
        *_unused(),
    ]
    node: Any = _PagedAttentionExtension([one.output(0) for one in inputs])
    about = node.get_rt_info()
    about["num_k_heads"] = about["num_v_heads"] = heads.kv_heads
    about["k_head_size"] = about["v_head_size"] = size
    by_row = op.concat([op.unsqueeze(part, _int32(0)) for part in (rows, tokens)] + [_int32([heads.heads, size])], 0)
    return op.transpose(op.reshape(node.output(0), by_row, False), _int32([0, 2, 1, 3])).output(0)


def _by_token(value: Output, width: int) -> Node:
    """Reshape [B,heads,S,D] -> [B*S,heads*D]."""
    from openvino import opset13 as op

    return op.reshape(op.transpose(value, _int32([0, 2, 1, 3])), _int32([-1, width]), False)


def _unused() -> list[Node]:
    """Return the inputs that switch off features of OpenVINO's paged attention that are not used here.

    In order: window of the score output; rotation of blocks (blocks, deltas, table); sparse attention (threshold, block
    size, stride); sinks; diversity of evicted blocks (start, sizes, blocks, where they begin); token types; biases
    among queries (values, where they begin).
    """
    numbers, reals = _empty(np.int32), _empty(np.float32)
    rotation, sparse = [numbers, numbers, reals], [reals, _int32(0), _int32(0)]
    diversity = [_int32(0), numbers, numbers, numbers]
    return [numbers, *rotation, *sparse, reals, *diversity, numbers, _empty(np.uint8), numbers]


def _int32(value: int | list[int]) -> Node:
    from openvino import opset13 as op

    return op.constant(np.array(value, np.int32))


def _empty(dtype: type[np.generic]) -> Node:
    from openvino import opset13 as op

    return op.constant(np.zeros(0, dtype))
