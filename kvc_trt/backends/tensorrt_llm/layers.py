"""Layers of a Llama-like decoder made with TensorRT-LLM's functions, and our plugins as layers.

Activations are token-major, [T, width].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.tensorrt_llm.builder_api import BuilderApi, Tensor
from kvc_trt.backends.tensorrt_llm.parts import missing_part
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.rope import rotary_tables
from kvc_trt.models.weights import WeightSource
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.schema import VERSION, Operator

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Angles = tuple[Tensor, Tensor]


class NetworkLayers:
    """Adds layers to the network of the enclosing net_guard; `model.dtype` is the type of weights and activations."""

    def __init__(self, api: BuilderApi, model: ModelConfig, weights: WeightSource, length: int) -> None:
        assert missing_part(model) is None, "a build asks before it does any work"
        self.api, self.model = api, model
        self._f, self._weights = api.functional, weights
        self._length = length
        self._constants: dict[str, Tensor] = {}

    def embed(self, ids: Tensor) -> Tensor:
        """Look up token ids: INT64 [T] -> [T,hidden]."""
        return self._f.embedding(ids, self._weight(EMBEDDING))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply RMSNorm over the last dimension."""
        weight, size = self._weight(name), self._weights.shape(name)[0]
        return self._f.rms_norm(x, size, weight=weight, eps=self.model.norm_epsilon)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply `x` [T,in] by NAME.weight [out,in] and add NAME.bias [out] if the model has one."""
        product = self._f.matmul(x, self._weight(f"{name}.weight"), transb=True)
        return product + self._weight(f"{name}.bias") if self._has_bias(name) else product

    def feed_forward(self, x: Tensor, layer: str) -> Tensor:
        """Apply SwiGLU: down(silu(gate(x)) * up(x))."""
        gate, up = self.linear(x, f"{layer}.mlp.gate_proj"), self.linear(x, f"{layer}.mlp.up_proj")
        return self.linear(self._f.silu(gate) * up, f"{layer}.mlp.down_proj")

    def head(self, x: Tensor) -> Tensor:
        """Return the logits [T,vocab] of hidden states [T,hidden]."""
        name = EMBEDDING if self.model.tie_word_embeddings else HEAD
        return self._f.matmul(self.norm(x, FINAL_NORM), self._weight(name), transb=True)

    def angles(self, positions: Tensor) -> Angles:
        """Return cosine and sine, FLOAT [T,1,D/2], of INT64 positions [T]; all layers share them."""
        tables = [self._f.constant(table) for table in rotary_tables(self.model, self._length)]
        cosine, sine = (self._f.embedding(positions, t).view([-1, 1, self.model.head_size // 2]) for t in tables)
        return cosine, sine

    def looked_up(self, table: NDArray[np.int64], lengths: Tensor) -> Tensor:
        """Return the numbers of a table [L] at INT64 lengths [B], which may be longer than it; INT64 [B]."""
        places = self._f.minimum(lengths, len(table) - 1)
        return self._f.embedding(places, self._f.constant(np.ascontiguousarray(table[:, None]))).view([-1])

    def query(self, x: Tensor, layer: str, angles: Angles) -> Tensor:
        """Return rotated queries FLOAT [T,H,D] of normed activations."""
        return self._rotated(x, layer, "q", self.model.num_attention_heads, angles)

    def key(self, x: Tensor, layer: str, angles: Angles) -> Tensor:
        """Return rotated keys [T,G,D]."""
        return self._rotated(x, layer, "k", self.model.num_key_value_heads, angles).cast(self.model.dtype)

    def value(self, x: Tensor, layer: str) -> Tensor:
        """Return values [T,G,D]."""
        model = self.model
        flat = self.linear(x, f"{layer}.self_attn.v_proj")
        return flat.view([-1, model.num_key_value_heads, model.head_size])

    def causal_attention(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """TensorRT's own attention of FLOAT queries [B,H,S,D] and keys, values [B,G,S,D] -> [B,H,S,D].

        It applies no scale. It may be decomposed only in fp32, for which it has no fused kernel: the scores of a long
        prompt do not fit in memory.
        """
        operation = self.api.tensorrt.AttentionNormalizationOp.SOFTMAX
        scaled = (query * (1 / math.sqrt(self.model.head_size))).cast(self.model.dtype)
        attention = self.api.default_trtnet().add_attention(
            scaled.trt_tensor, keys.trt_tensor, values.trt_tensor, operation, True
        )
        attention.decomposable = self.model.dtype == "float32"
        # An attention is not a layer, so `_create_tensor`, which names the layer, cannot wrap it.
        output = attention.get_output(0)
        return self.api.make_tensor(trt_tensor=output, network=self.api.default_net(), is_network_input=False)

    def _rotated(self, x: Tensor, layer: str, kind: str, heads: int, angles: Angles) -> Tensor:
        size, attention = self.model.head_size, f"{layer}.self_attn"
        rows = self.linear(x, f"{attention}.{kind}_proj").view([-1, heads, size])
        if self.model.qk_norm:
            rows = self.norm(rows, f"{attention}.{kind}_norm.weight")
        cosine, sine = angles
        first, second = rows.cast("float32").split(size // 2, 2)
        return self._f.concat([first * cosine - second * sine, second * cosine + first * sine], dim=2)

    def _has_bias(self, name: str) -> bool:
        if name.endswith("o_proj"):
            return self.model.output_bias
        return self.model.qkv_bias and ".self_attn." in name

    def _weight(self, name: str) -> Tensor:
        if name not in self._constants:
            dtype = self.model.dtype
            array: NDArray[Any] = self._weights.read(name).astype(numpy_dtype(dtype), copy=False)
            as_dtype = getattr(self.api.tensorrt, dtype)
            self._constants[name] = self._f.constant(np.ascontiguousarray(array), as_dtype)
        return self._constants[name]


def add_plugin(
    api: BuilderApi, operator: Operator, inputs: Mapping[str, Tensor], attributes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Add the plugin layer of an operator, in the form of its attributes; returns its outputs by name.

    Every attribute is an INT32 field; all inputs are ordinary tensors, none a shape.
    """
    trt, operator = api.tensorrt, operator.for_numbers(attributes)
    creator = trt.get_plugin_registry().get_creator(operator.name, VERSION, KVC_DOMAIN)
    if creator is None:
        raise UnsupportedEnvironment(f"plugin {KVC_DOMAIN}::{operator.name} is not registered", hint="kvc-trt doctor")
    values = {attribute.name: attributes[attribute.name] for attribute in operator.attributes}
    fields = [
        trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32) for name, value in values.items()
    ]
    plugin = creator.create_plugin(operator.name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise UnsupportedEnvironment(f"plugin {operator.name} refuses {values}", hint="its reason is printed above")
    given = [inputs[tensor.name].trt_tensor for tensor in operator.inputs]
    layer = api.default_trtnet().add_plugin_v3(given, [], plugin)
    if layer is None:
        hint = "its reason is printed above"
        raise UnsupportedEnvironment(f"TensorRT refuses a layer of plugin {operator.name}", hint=hint)
    names = (tensor.name for tensor in operator.outputs)
    return {name: api.wrap_output(layer.get_output(index), layer) for index, name in enumerate(names)}


def own_attributes(operator: Operator, parameters: PolicyParameters) -> dict[str, int]:
    """Return the attributes of an operator from a policy's parameters."""
    return {attribute.name: getattr(parameters, attribute.name) for attribute in operator.attributes}


def compact(
    api: BuilderApi, parameters: PolicyParameters, layer: int, inputs: Mapping[str, Tensor], pages: bool
) -> dict[str, Tensor]:
    """Add KvcCompact for one layer.

    An uncompressed layer has a slot for every token and keeps all; without pages its bounds are one page.
    """
    rule = parameters.groups(layer)[0].parameters
    attributes = own_attributes(COMPACT.with_lengths() if rule.by_length else COMPACT, rule)
    if not rule.compresses:
        attributes |= {"prompt_budget": rule.capacity, "pool_kernel": 1}
    if not pages:
        attributes["page_size"] = rule.capacity
    return add_plugin(api, COMPACT, inputs, attributes)
