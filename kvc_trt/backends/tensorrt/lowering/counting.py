"""Counting plugin layers. NVIDIA's parser replaces a plugin that it does not find without a word, so nobody may rely on
the absence of errors: what was expected is counted in the graph, what is there in the network."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from onnx import ModelProto

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.operators import KVC_DOMAIN


def expected_plugins(model: ModelProto) -> dict[str, int]:
    """Operators of ours in a lowered graph, and how many of each."""
    return dict(Counter(node.op_type for node in model.graph.node if node.domain == KVC_DOMAIN))


def plugin_layers(network: Any) -> dict[str, int]:
    """Plugin layers of a parsed network (INetworkDefinition), counted by the operator that their names tell."""
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return dict(Counter(_operator(layer.name) for layer in layers if layer.type.name == "PLUGIN_V3"))


def check_plugin_layers(network: Any, expected: Mapping[str, int]) -> None:
    """Raise UnsupportedEnvironment unless the network has exactly the expected plugin layers of every operator."""
    found = plugin_layers(network)
    wrong = [
        f"{name}: expected {expected.get(name, 0)}, found {found.get(name, 0)}"
        for name in sorted({*expected, *found})
        if expected.get(name, 0) != found.get(name, 0)
    ]
    if wrong:
        raise UnsupportedEnvironment(
            f"plugin layers after parsing: {'; '.join(wrong)}", hint="kvc-trt doctor shows the plugin library in use"
        )


def expected_attention(model: ModelProto) -> int:
    """Attention layers of a lowered graph that TensorRT provides itself."""
    return sum(node.domain == "" and node.op_type == "Attention" for node in model.graph.node)


def check_attention_layers(network: Any, expected: int) -> None:
    """Raise UnsupportedEnvironment unless the parser made one causal attention layer of every Attention.

    Taken apart into products and a softmax, attention to a long prompt needs memory with the square of its length. And
    the parser passes over attributes that its version does not know: one of them could be the causal mask.
    """
    module = sys.modules[type(network).__module__]
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    attention = [_attention(layer, module) for layer in layers if layer.type.name == "ATTENTION_INPUT"]
    causal = sum(bool(layer.causal) for layer in attention)
    if (len(attention), causal) != (expected, expected):
        raise UnsupportedEnvironment(
            f"attention layers after parsing: expected {expected}, all causal; found {len(attention)}, {causal} causal",
            hint="kvc-trt doctor shows the TensorRT in use",
        )


def _attention(layer: Any, module: Any) -> Any:
    """The IAttention behind the layer that marks its inputs."""
    layer.__class__ = module.IAttentionInputLayer
    return layer.attention


def _operator(layer: str) -> str:
    """`layers.3/KvcCompact_41` -> `KvcCompact`: the parser names a layer after its node."""
    named = re.match("[A-Za-z]+", layer.rpartition("/")[2])
    return named.group() if named else layer
