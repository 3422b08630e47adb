"""Every entry is read: the cache of `full`, of skipped layers and of policies that only evict from the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from onnx import FunctionProto

from kvc_trt.graph.caches.prompt import PromptLayer, compact_body, store_compacted, store_whole
from kvc_trt.graph.caches.step import StepLayer, head_shape
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.operators import dense_attention
from kvc_trt.operators import function as functions
from kvc_trt.operators.emitter import Value


def prefill(layers: Layers, prompt: PromptLayer, site: CacheSite) -> None:
    """The prompt, compacted if the policy evicts; page bounds come out of the operator and are not used."""
    if site.parameters.prompt_eviction == "none":
        store_whole(layers, prompt, site)
        return
    if site.parameters.prompt_eviction == "snapkv":
        keys, values = (_per_query_head(layers, part) for part in (prompt.keys, prompt.values))
        prompt = replace(prompt, keys=keys, values=values)
    store_compacted(layers, prompt, site, f"unused_bounds.{site.name}")


def decode(layers: Layers, step: StepLayer, site: CacheSite) -> Value:
    """KvcDenseAttention."""
    caches = [f"k_cache.{site.name}", f"v_cache.{site.name}"]
    written = [f"k_cache_out.{site.name}", f"v_cache_out.{site.name}"]
    key, value = step.key, step.value
    if site.parameters.prompt_eviction == "snapkv":
        key, value = _per_query_head(layers, key), _per_query_head(layers, value)
    inputs = [step.query, key, value, *caches, step.lengths]
    until = step.batch.slice_until
    functions.call(layers.emit, dense_attention.NAME, inputs, [step.attended, *written], dense_until=until)
    return step.attended


def _per_query_head(layers: Layers, rows: Value) -> Value:
    """`rows` [B,G,...], each head repeated for every query head that shares it."""
    config = layers.config
    shared = [head // config.group_size for head in range(config.num_attention_heads)]
    return str(layers.emit.Gather(rows, shared, axis=1))


def bodies(layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
    """KvcDenseAttention and KvcCompact."""
    shape = head_shape(layers.config, parameters)
    return {
        dense_attention.NAME: lambda: dense_attention.dense_attention(shape),
        **compact_body(layers, parameters),
    }
