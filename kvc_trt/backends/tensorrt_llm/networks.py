"""Define the two networks of an engine, with the same inputs and outputs as `kvc_trt.graph.build`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvc_trt.backends.tensorrt.building.profiles import SizeRange, decode_profiles, prefill_profiles
from kvc_trt.backends.tensorrt_llm.builder_api import BuilderApi, Tensor
from kvc_trt.backends.tensorrt_llm.layers import Angles, NetworkLayers, add_plugin, compact, own_attributes
from kvc_trt.graph.state import state_tensors, uses_pages
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION

Dynamic = tuple[str, Sequence[tuple[int, int, int]]]
"""A dynamic dimension: its name, and smallest, optimal and largest size in every profile."""


def define_prefill(layers: NetworkLayers, parameters: PolicyParameters, max_batch_size: int) -> None:
    """input_ids INT64 [B,S], prompt_lengths INT64 [B] -> logits, cache_lengths and every state tensor."""
    f, model = layers.api.functional, layers.model
    profiles = prefill_profiles(parameters.max_input_len, max_batch_size)
    rows = _dynamic("batch", [profile.batch for profile in profiles])
    sequence = _dynamic("sequence", [profile.sequence for profile in profiles if profile.sequence is not None])
    ids = _input(layers.api, "input_ids", "int64", [rows, sequence])
    lengths = _input(layers.api, "prompt_lengths", "int64", [rows])
    grid = [f.shape(ids, 0), f.shape(ids, 1)]
    angles = layers.angles(_positions(layers.api, ids, parameters.max_sequence_len - 1))
    window = _window(layers.api, lengths, parameters.window)
    own = _numbers_by_length(layers, parameters, lengths)
    x = layers.embed(ids.view([-1]))
    stored = []
    for layer in range(model.num_hidden_layers):
        name = f"model.layers.{layer}"
        normed = layers.norm(x, f"{name}.input_layernorm.weight")
        query, key, value = _project(layers, normed, name, angles)
        queries = _by_head(layers, query, grid, model.num_attention_heads)
        keys, values = (_by_head(layers, part, grid, model.num_key_value_heads) for part in (key, value))
        attended = layers.causal_attention(queries, keys, values).permute([0, 2, 1, 3])
        x = _after_attention(layers, x, attended, name)
        last = _last_queries(layers, query, grid, window, parameters.window)
        inputs = {"q_window": last, "k": keys, "v": values, "prompt_lengths": lengths, **own}
        stored.append(_store(layers, parameters, layer, inputs))
    f.concat([one.view([1, -1]) for one in stored], dim=0).mark_output("cache_lengths", "int64")
    by_row = x.view(f.concat([*grid, model.hidden_size]))
    final = f.gather_nd(by_row, (lengths - 1).view([-1, 1]), batch_dims=1)
    layers.head(final).mark_output("logits", "float32")


def define_decode(layers: NetworkLayers, parameters: PolicyParameters, max_batch_size: int, slice_until: int) -> None:
    """token, positions INT64 [B], cache_lengths INT64 [caches,B] and the state -> logits and the state, in place."""
    f, model = layers.api.functional, layers.model
    rows = _dynamic("batch", [profile.batch for profile in decode_profiles(max_batch_size)])
    token, positions = (_input(layers.api, name, "int64", [rows]) for name in ("token", "positions"))
    cache_lengths = _input(layers.api, "cache_lengths", "int64", [model.num_hidden_layers, rows])
    angles = layers.angles(positions)
    x = layers.embed(token)
    state = state_tensors(model, parameters, model.dtype)
    for layer in range(model.num_hidden_layers):
        name = f"model.layers.{layer}"
        of_layer = [tensor for tensor in state if tensor.layer == layer]
        normed = layers.norm(x, f"{name}.input_layernorm.weight")
        query, key, value = _project(layers, normed, name, angles)
        inputs = {"query": query.cast(model.dtype), "k_new": key, "v_new": value}
        for one in of_layer:
            inputs[one.name.partition(".")[0]] = _input(layers.api, one.name, one.dtype, [rows, *one.shape])
        inputs["cache_lengths"] = f.select(cache_lengths, 0, layer)
        if uses_pages(parameters, layer):
            operator, attributes = HYBRID_ATTENTION, own_attributes(HYBRID_ATTENTION, parameters)
        else:
            operator, attributes = DENSE_ATTENTION, {"dense_until": slice_until}
        made = add_plugin(layers.api, operator, inputs, attributes)
        for one in of_layer:
            made[one.aliased_output.partition(".")[0]].mark_output(one.aliased_output, one.dtype)
        x = _after_attention(layers, x, made["output"], name)
    layers.head(x).mark_output("logits", "float32")


def _dynamic(name: str, ranges: Sequence[SizeRange]) -> Dynamic:
    return name, [(one.smallest, one.fastest, one.largest) for one in ranges]


def _input(api: BuilderApi, name: str, dtype: str, axes: Sequence[int | Dynamic]) -> Tensor:
    """Add a network input. Equal names mean equal sizes, so a static dimension is named after place and size."""
    profiles = next(len(axis[1]) for axis in axes if not isinstance(axis, int))
    ranges: OrderedDict[str, list[Any]] = OrderedDict()
    for place, axis in enumerate(axes):
        if isinstance(axis, int):
            ranges[f"axis_{place}_of_{axis}"] = [axis] * profiles
        else:
            ranges[axis[0]] = [list(one) for one in axis[1]]
    return api.make_tensor(name, dtype, [axis if isinstance(axis, int) else -1 for axis in axes], ranges)


def _project(layers: NetworkLayers, normed: Tensor, name: str, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """Project to queries FLOAT [T,H,D], keys and values [T,G,D]."""
    return layers.query(normed, name, angles), layers.key(normed, name, angles), layers.value(normed, name)


def _by_head(layers: NetworkLayers, part: Tensor, grid: Sequence[Tensor], heads: int) -> Tensor:
    """Reshape [T,heads,D] -> [B,heads,S,D]."""
    shape = layers.api.functional.concat([*grid, heads, layers.model.head_size])
    return part.view(shape).permute([0, 2, 1, 3])


def _after_attention(layers: NetworkLayers, x: Tensor, attended: Tensor, name: str) -> Tensor:
    """Apply output projection, residuals and feed-forward; `attended` has one row of all heads per token."""
    model = layers.model
    flat = attended.view([-1, model.num_attention_heads * model.head_size])
    x = x + layers.linear(flat, f"{name}.self_attn.o_proj")
    return x + layers.feed_forward(layers.norm(x, f"{name}.post_attention_layernorm.weight"), name)


def _positions(api: BuilderApi, ids: Tensor, last: int) -> Tensor:
    """Return the positions 0, 1, ... of every row, INT64 [B*S]. Padding beyond `last` is never used."""
    f = api.functional
    counted = f.arange(f.constant(np.array(0, np.int64)), f.shape(ids, 1), "int64")
    return f.expand(f.minimum(counted, last).view([1, -1]), f.shape(ids)).view([-1])


def _window(api: BuilderApi, lengths: Tensor, width: int) -> Tensor:
    """Return the positions of each row's last W queries, INT64 [B,W,1]; 0 for those before its start."""
    offsets = api.functional.constant(np.arange(-width, 0, dtype=np.int64).reshape(1, width))
    return api.functional.maximum(lengths.view([-1, 1]) + offsets, 0).view([-1, width, 1])


def _numbers_by_length(layers: NetworkLayers, parameters: PolicyParameters, lengths: Tensor) -> dict[str, Tensor]:
    """Return each prompt's budget and pool kernel by its length, INT64 [B]; nothing if rows are alike."""
    if not parameters.by_length:
        return {}
    budgets = parameters.budgets
    kernels = np.array([parameters.pool_kernel_of(count) for count in range(len(budgets))], np.int64)
    return {"prompt_budgets": layers.looked_up(budgets, lengths), "pool_kernels": layers.looked_up(kernels, lengths)}


def _last_queries(layers: NetworkLayers, query: Tensor, grid: Sequence[Tensor], window: Tensor, width: int) -> Tensor:
    """Gather the queries of the observation window: FLOAT [T,H,D] -> [B,H,W,D]."""
    f, model = layers.api.functional, layers.model
    rows = query.cast(model.dtype).view(f.concat([*grid, model.num_attention_heads * model.head_size]))
    chosen = f.gather_nd(rows, window, batch_dims=1)
    return chosen.view([0, width, model.num_attention_heads, model.head_size]).permute([0, 2, 1, 3])


def _store(layers: NetworkLayers, parameters: PolicyParameters, layer: int, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compact the layer's prompt, mark its state as outputs, and return its cache lengths [B]."""
    made = compact(layers.api, parameters, layer, inputs, uses_pages(parameters, layer))
    for one in state_tensors(layers.model, parameters, layers.model.dtype):
        if one.layer == layer:
            made[one.name.partition(".")[0]].mark_output(one.name, one.dtype)
    return made["cache_lengths"]
