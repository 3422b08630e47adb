"""One decoder layer, as prefill and as decode write it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvc_trt.graph import functions
from kvc_trt.graph.emitter import Emitter, Value
from kvc_trt.graph.functions import compact, dense_attention, hybrid_attention, prefill_attention
from kvc_trt.graph.functions.shapes import count_to, size
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import uses_pages
from kvc_trt.policies.parameters import PolicyParameters


@dataclass(frozen=True)
class Prompt:
    """What every layer of the prefill graph needs to know about the batch."""

    lengths: Value
    """[B]"""
    grid: Value
    """INT64 [2]: batch, sequence."""
    angles: tuple[Value, Value]
    """Cosine and sine of the positions, [B,S,D/2]"""
    window: Value
    """INT64 [B,W,1]: positions of each row's last W queries; rows before its start point at 0."""


def prefill_layer(layers: Layers, parameters: PolicyParameters, prompt: Prompt, x: Value, layer: int) -> Value:
    """Residual stream [T,hidden] through one layer; writes k_cache.L, v_cache.L, bounds.L, indices.L, lengths.L."""
    emit, config, name = layers.emit, layers.config, f"model.layers.{layer}"
    normed = layers.norm(x, f"{name}.input_layernorm.weight")
    query, key = (_rotated(layers, prompt, normed, layer, kind) for kind in ("q", "k"))
    value = _by_row(layers, prompt, layers.linear(normed, f"{name}.self_attn.v_proj"))
    queries, keys, values = (_by_head(emit, part, config.head_size) for part in (query, key, value))
    attended = functions.call(emit, prefill_attention.NAME, [queries, keys, values], 1)
    flat = emit.Reshape(
        emit.Transpose(attended, perm=[0, 2, 1, 3]), [-1, config.num_attention_heads * config.head_size]
    )
    if parameters.is_compressed(layer):
        window = _by_head(emit, emit.GatherND(query, prompt.window, batch_dims=1), config.head_size)
        _compact(emit, parameters, [window, keys, values, prompt.lengths], layer)
    else:
        _store_whole(emit, parameters.layer_capacity(layer), keys, values, prompt.lengths, layer)
    x = emit.Add(x, layers.linear(flat, f"{name}.self_attn.o_proj"))
    normed = layers.norm(x, f"{name}.post_attention_layernorm.weight")
    return str(emit.Add(x, layers.feed_forward(normed, name)))


def _rotated(layers: Layers, prompt: Prompt, normed: Value, layer: int, kind: str) -> Value:
    """Queries or keys of the whole prompt after RoPE, [B,S,heads*D]."""
    config, attention = layers.config, f"model.layers.{layer}.self_attn"
    rows = _by_row(layers, prompt, layers.linear(normed, f"{attention}.{kind}_proj"))
    if config.qk_norm:
        rows = layers.norm_heads(rows, f"{attention}.{kind}_norm.weight")
    heads = config.num_attention_heads if kind == "q" else config.num_key_value_heads
    return layers.rotate(rows, prompt.angles, heads)


def _by_row(layers: Layers, prompt: Prompt, x: Value) -> Value:
    """[T,width] -> [B,S,width]"""
    return str(layers.emit.Reshape(x, layers.emit.Concat(prompt.grid, [-1], axis=0)))


def _by_head(emit: Emitter, x: Value, head_size: int) -> Value:
    """[B,S,heads*D] -> [B,heads,S,D]"""
    return str(emit.Transpose(emit.Reshape(x, [0, 0, -1, head_size]), perm=[0, 2, 1, 3]))


def _compact(emit: Emitter, parameters: PolicyParameters, inputs: list[Value], layer: int) -> None:
    bounds = f"bounds.{layer}" if uses_pages(parameters, layer) else f"unused_bounds.{layer}"
    outputs = [f"k_cache.{layer}", f"v_cache.{layer}", bounds, f"lengths.{layer}", f"indices.{layer}"]
    functions.call(
        emit, compact.NAME, inputs, outputs, prompt_budget=parameters.prompt_budget, capacity=parameters.capacity,
        pool_kernel=parameters.pool_kernel, page_size=parameters.page_size,
    )  # fmt: skip


def _store_whole(emit: Emitter, capacity: int, keys: Value, values: Value, lengths: Value, layer: int) -> None:
    """The whole prompt in a cache of `capacity` slots; nothing is selected, padding is zero."""
    count = emit.Min(size(emit, keys, 2), [capacity])
    stored = emit.Less(emit.Unsqueeze(count_to(emit, count), [1]), emit.Reshape(lengths, [-1, 1, 1, 1]))
    missing = emit.Concat([0], emit.Sub([capacity], count), axis=0)
    for rows, name in ((keys, "k_cache"), (values, "v_cache")):
        zero = emit.CastLike(np.float32(0), rows)
        kept = emit.Where(stored, emit.Slice(rows, [0], count, [2]), zero)
        emit.Pad(kept, missing, zero, [2], outputs=[f"{name}.{layer}"])
    emit.Identity(lengths, outputs=[f"lengths.{layer}"])


@dataclass(frozen=True)
class Step:
    """What every layer of the decode graph needs to know about the batch."""

    angles: tuple[Value, Value]
    """Cosine and sine of the positions, [B,1,D/2]"""
    cache_lengths: Value
    """[caches,B]"""
    slice_until: int
    """Dense layers attend to a slice of at most so many entries, as a sparse layer does where a row fits."""


def decode_layer(layers: Layers, parameters: PolicyParameters, step: Step, x: Value, layer: int) -> Value:
    """Residual stream [B,hidden] through one layer; reads and writes its state tensors."""
    emit, config, name = layers.emit, layers.config, f"model.layers.{layer}"
    query, key, value = _project(layers, step, layers.norm(x, f"{name}.input_layernorm.weight"), layer)
    caches = [f"k_cache.{layer}", f"v_cache.{layer}"]
    written = [f"k_cache_out.{layer}", f"v_cache_out.{layer}"]
    lengths = emit.Gather(step.cache_lengths, layer)
    attended = f"{name}.attended"
    if uses_pages(parameters, layer):
        outputs = [attended, *written, f"bounds_out.{layer}", f"selected.{layer}"]
        functions.call(
            emit, hybrid_attention.NAME, [query, key, value, *caches, f"bounds.{layer}", lengths], outputs,
            page_size=parameters.page_size, top_r=parameters.top_r, top_k=parameters.top_k,
            token_budget=parameters.token_budget, dense_until=parameters.dense_until,
        )  # fmt: skip
    else:
        inputs = [query, key, value, *caches, lengths]
        functions.call(emit, dense_attention.NAME, inputs, [attended, *written], dense_until=step.slice_until)
    flat = emit.Reshape(attended, [0, config.num_attention_heads * config.head_size])
    x = emit.Add(x, layers.linear(flat, f"{name}.self_attn.o_proj"))
    normed = layers.norm(x, f"{name}.post_attention_layernorm.weight")
    return str(emit.Add(x, layers.feed_forward_joined(normed, name)))


def _project(layers: Layers, step: Step, normed: Value, layer: int) -> tuple[Value, Value, Value]:
    """Query [B,H,D], key and value [B,G,D] of one token per row; query and key are rotated together."""
    emit, config, attention = layers.emit, layers.config, f"model.layers.{layer}.self_attn"
    heads, kv_heads, head_size = config.num_attention_heads, config.num_key_value_heads, config.head_size
    joined = layers.linear_joined(normed, [f"{attention}.{kind}_proj" for kind in "qkv"])
    rows = emit.Reshape(joined, [0, 1, (heads + 2 * kv_heads) * head_size])
    if config.qk_norm:
        widths = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
        query, key, value = emit.Split(rows, widths, axis=2, outputs=3)
        query, key = (
            layers.norm_heads(part, f"{attention}.{kind}_norm.weight") for part, kind in ((query, "q"), (key, "k"))
        )
        to_rotate = emit.Concat(query, key, axis=2)
    else:
        to_rotate, value = emit.Split(rows, [(heads + kv_heads) * head_size, kv_heads * head_size], axis=2, outputs=2)
    rotated = layers.rotate(to_rotate, step.angles, heads + kv_heads)
    both = emit.Reshape(rotated, [0, heads + kv_heads, head_size])
    query, key = emit.Split(both, [heads, kv_heads], axis=1, outputs=2)
    return query, key, str(emit.Reshape(value, [0, kv_heads, head_size]))
