"""Our plugins as layers of a TensorRT-LLM network, through TensorRT's V3 plugin interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvc_trt.backends.tensorrt.plugins import NAMESPACE
from kvc_trt.backends.tensorrt_llm.protocol import BuilderApi, Tensor
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.methods.parameters import PolicyParameters

VERSION = "1"


def add_plugin(
    api: BuilderApi, name: str, inputs: Sequence[Tensor], attributes: Mapping[str, int], outputs: int
) -> tuple[Tensor, ...]:
    """Add one plugin layer. Every attribute is an INT32 field; all inputs are ordinary tensors, none a shape."""
    trt = api.tensorrt
    creator = trt.get_plugin_registry().get_creator(name, VERSION, NAMESPACE)
    if creator is None:
        raise UnsupportedEnvironment(f"plugin {NAMESPACE}::{name} is not registered", hint="kvc-trt doctor")
    fields = [
        trt.PluginField(field, np.array([value], np.int32), trt.PluginFieldType.INT32)
        for field, value in attributes.items()
    ]
    plugin = creator.create_plugin(name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise UnsupportedEnvironment(f"plugin {name} refuses {dict(attributes)}", hint="its reason stands above")
    layer = api.default_trtnet().add_plugin_v3([tensor.trt_tensor for tensor in inputs], [], plugin)
    if layer is None:
        raise UnsupportedEnvironment(f"TensorRT refuses a layer of plugin {name}", hint="its reason stands above")
    return tuple(api.wrap_output(layer.get_output(index), layer) for index in range(outputs))


def compact(
    api: BuilderApi, parameters: PolicyParameters, layer: int, inputs: Sequence[Tensor], pages: bool
) -> tuple[Tensor, ...]:
    """(q_window [B,H,W,D], k, v [B,G,S,D], lengths [B]) -> (k_cache, v_cache, bounds, cache_lengths, indices).

    A layer that is not compressed has a slot for every token and keeps all; without pages its bounds are one page.
    """
    rule = parameters.groups(layer)[0].parameters
    attributes = {
        "prompt_budget": rule.prompt_budget if rule.compresses else rule.capacity,
        "capacity": rule.capacity,
        "pool_kernel": rule.pool_kernel if rule.compresses else 1,
        "page_size": rule.page_size if pages else rule.capacity,
    }
    return add_plugin(api, "KvcCompact", inputs, attributes, 5)


def hybrid_attention(api: BuilderApi, parameters: PolicyParameters, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(query, k_new, v_new, k_cache, v_cache, bounds, lengths) -> (output, k_cache, v_cache, bounds, selected)."""
    names = ("page_size", "top_r", "top_k", "token_budget", "dense_until")
    attributes = {name: getattr(parameters, name) for name in names}
    return add_plugin(api, "KvcHybridAttention", inputs, attributes, 5)


def dense_attention(api: BuilderApi, slice_until: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(query, k_new, v_new, k_cache, v_cache, lengths) -> (output, k_cache, v_cache)."""
    return add_plugin(api, "KvcDenseAttention", inputs, {"dense_until": slice_until}, 3)
