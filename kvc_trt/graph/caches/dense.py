"""Every entry is read: the cache of `full`, of skipped layers and of policies that only evict from the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import FunctionProto

from kvc_trt.graph import functions
from kvc_trt.graph.caches.prompt import PromptLayer, compact_body, store_compacted, store_whole
from kvc_trt.graph.caches.step import StepLayer, head_shape
from kvc_trt.graph.emitter import Value
from kvc_trt.graph.functions import dense_attention
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.policies.parameters import PolicyParameters


def prefill(layers: Layers, prompt: PromptLayer, site: CacheSite) -> None:
    """The prompt, compacted if the policy evicts; page bounds come out of the operator and are not used."""
    if site.parameters.prompt_eviction == "none":
        store_whole(layers, prompt, site)
    else:
        store_compacted(layers, prompt, site, f"unused_bounds.{site.name}")


def decode(layers: Layers, step: StepLayer, site: CacheSite) -> Value:
    """KvcDenseAttention."""
    caches = [f"k_cache.{site.name}", f"v_cache.{site.name}"]
    written = [f"k_cache_out.{site.name}", f"v_cache_out.{site.name}"]
    inputs = [step.query, step.key, step.value, *caches, step.lengths]
    until = step.batch.slice_until
    functions.call(layers.emit, dense_attention.NAME, inputs, [step.attended, *written], dense_until=until)
    return step.attended


def bodies(layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
    """KvcDenseAttention and KvcCompact."""
    shape = head_shape(layers.config)
    return {
        dense_attention.NAME: lambda: dense_attention.dense_attention(shape),
        **compact_body(layers, parameters),
    }
