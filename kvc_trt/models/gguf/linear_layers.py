"""Linear layers (Gated DeltaNet) in GGUF files: their keys, and the places of their weights.

llama.cpp stores queries, keys and values one under the other, norms with the one added, and the decay of a head as
-exp(A_log). Of Qwen3.5 it brings the value heads into another order: the first of each key head, then the second of
each, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.config import Linear, ModelConfig
from kvc_trt.models.family_weights import Rows
from kvc_trt.models.gguf.keys import LATER_TOKENS, MOST_LAYERS, GgufKeys
from kvc_trt.models.weights import (
    ATTENTION_GATE,
    CONVOLUTION,
    DECAY,
    DECAY_BIAS,
    LINEAR_DECAY,
    LINEAR_GATE,
    LINEAR_MIXED,
    LINEAR_NORM,
    LINEAR_OUTPUT,
    LINEAR_WRITE,
)

LINEAR_KEYS = {
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "full_attention_interval": "full_attention_interval",
}
"""Fields of config.json -> keys."""
_WIDTH = "ssm.inner_size"
"""The channels of all value heads."""


def linear_fields(keys: GgufKeys) -> Mapping[str, Any]:
    """Return the layers that compute the next token, and the size of a value head."""
    layers, later = keys["block_count"], keys[LATER_TOKENS] or 0
    if type(layers) is not int or type(later) is not int or not 0 <= later < layers <= MOST_LAYERS:
        raise keys.wrong(LATER_TOKENS, f"a part of block_count, which is at most {MOST_LAYERS}")
    width, heads = keys[_WIDTH], keys["ssm.time_step_rank"]
    if type(width) is not int or type(heads) is not int or heads < 1 or width % heads:
        raise keys.wrong(_WIDTH, "a multiple of ssm.time_step_rank, the value heads")
    return {"num_hidden_layers": layers - later, "linear_value_head_dim": width // heads}


Heads = Callable[[Linear], NDArray[np.int64]]
"""For each value head of ours, its place in the file."""


def as_they_are(part: Linear) -> NDArray[np.int64]:
    """Value heads in their order, those of a key head side by side."""
    return np.arange(part.value_heads)


def first_of_each_key_head_first(part: Linear) -> NDArray[np.int64]:
    """Value heads in the order of Qwen3.5's files."""
    places: NDArray[np.int64] = np.arange(part.value_heads).reshape(-1, part.key_heads).T.reshape(-1)
    return places


def linear_places(config: ModelConfig, heads: Heads) -> dict[str, Rows]:
    """Return where a file has the weights of linear layers, and the gates of full ones beside their queries."""
    places: dict[str, Rows] = {}
    order = cache(lambda part: _Order.of(part, heads(part)))
    for layer in range(config.num_hidden_layers):
        part, theirs = config.attention(layer).linear, f"blk.{layer}"
        found = _full(config, theirs) if part is None else _linear(part, theirs, order(part))
        places |= {f"model.layers.{layer}.{name}": rows for name, rows in found.items()}
    return places


class _Order(NamedTuple):
    """Where a file has heads and channels. Computed once for all linear layers: there may be a million channels."""

    heads: NDArray[np.int64]
    channels: NDArray[np.int64]
    """Channels of all value heads."""
    values: NDArray[np.int64]
    """Places of these channels behind queries and keys."""
    mixed: NDArray[np.int64]
    """Places of the channels of queries, keys and values."""

    @classmethod
    def of(cls, part: Linear, heads: NDArray[np.int64]) -> _Order:
        channels = (heads[:, None] * part.value_size + np.arange(part.value_size)).reshape(-1)
        values = 2 * part.keys + channels
        return cls(heads, channels, values, np.concatenate([np.arange(2 * part.keys), values]))


def _full(config: ModelConfig, theirs: str) -> dict[str, Rows]:
    size, joined = config.head_size, f"{theirs}.attn_q.weight"
    starts = {"self_attn.q_proj.weight": 0, f"{ATTENTION_GATE}.weight": size}
    return {name: Rows(joined, start, size, config.num_attention_heads, 2 * size) for name, start in starts.items()}


def _linear(part: Linear, theirs: str, order: _Order) -> dict[str, Rows]:
    mixed = f"{theirs}.attn_qkv.weight"
    query, key, value = (f"{name}.weight" for name in LINEAR_MIXED)
    return {
        query: Rows(mixed, 0, part.keys),
        key: Rows(mixed, part.keys, part.keys),
        value: Rows(mixed, order=order.values),
        f"{LINEAR_GATE}.weight": Rows(f"{theirs}.attn_gate.weight", order=order.channels),
        f"{LINEAR_WRITE}.weight": Rows(f"{theirs}.ssm_beta.weight", order=order.heads),
        f"{LINEAR_DECAY}.weight": Rows(f"{theirs}.ssm_alpha.weight", order=order.heads),
        CONVOLUTION: Rows(f"{theirs}.ssm_conv1d.weight", order=order.mixed),
        DECAY: Rows(f"{theirs}.ssm_a", order=order.heads),
        DECAY_BIAS: Rows(f"{theirs}.ssm_dt.bias", order=order.heads),
        LINEAR_NORM: Rows(f"{theirs}.ssm_norm.weight"),
        f"{LINEAR_OUTPUT}.weight": Rows(f"{theirs}.ssm_out.weight", columns=order.channels),
    }
