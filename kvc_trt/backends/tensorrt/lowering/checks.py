"""Check a parsed network and a built engine: plugin layers, fused attention, and buffers shared in place.

NVIDIA's parser silently replaces a plugin that it does not find, so the absence of errors proves nothing: expected
layers are counted in the graph and compared with those of the network.

Without in-place updates every layer of every step copies its whole cache, and an executor that binds one buffer to
input and output would read what it writes. So the aliases that an engine reports are compared too. Whether it reports
those of plugins is not documented; an alias that it does not report is left to the plugin, which compares the addresses
whenever it is queued.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from onnx import ModelProto

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.registry import OPERATORS


def check_network(network: Any, lowered: ModelProto) -> None:
    """Check a parsed network by the number of its plugin layers and fused attention layers."""
    check_plugin_layers(network, expected_plugins(lowered))
    check_attention_layers(network, expected_attention(lowered), expected_masks(lowered))


def expected_plugins(model: ModelProto) -> dict[str, int]:
    """Count the nodes of each of our operators in a lowered graph."""
    return dict(Counter(node.op_type for node in model.graph.node if node.domain == KVC_DOMAIN))


def plugin_layers(network: Any) -> dict[str, int]:
    """Count the plugin layers of a parsed network (INetworkDefinition) by the operator in their names."""
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
    """Count the attention nodes of a lowered graph that become TensorRT's own layers."""
    return sum(node.domain == "" and node.op_type == "Attention" for node in model.graph.node)


def expected_masks(model: ModelProto) -> int:
    """Count the attention layers that take a mask; the others are causal."""
    return sum(node.domain == "" and node.op_type == "Attention" and len(node.input) > 3 for node in model.graph.node)


def check_attention_layers(network: Any, expected: int, masked: int = 0) -> None:
    """Raise UnsupportedEnvironment unless the parser made one attention layer of every Attention, causal or `masked`.

    Decomposed into products and a softmax, attention needs memory quadratic in the prompt. And the parser ignores
    attributes that its version does not know, one of which could be the causal mask.
    """
    module = sys.modules[type(network).__module__]
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    attention = [_attention(layer, module) for layer in layers if layer.type.name == "ATTENTION_INPUT"]
    causal = sum(bool(layer.causal) for layer in attention)
    masks = sum(layer.mask is not None for layer in attention)
    if (len(attention), causal, masks) != (expected, expected - masked, masked):
        kinds = "all causal" if not masked else "all with a mask" if masked == expected else f"{masked} with a mask"
        raise UnsupportedEnvironment(
            f"attention layers after parsing: expected {expected}, {kinds}; "
            f"found {len(attention)}, {causal} causal" + (f", {masks} with a mask" if masked or masks else ""),
            hint="kvc-trt doctor shows the TensorRT in use",
        )


def _attention(layer: Any, module: Any) -> Any:
    """Return the IAttention of the layer that marks its inputs."""
    layer.__class__ = module.IAttentionInputLayer
    return layer.attention


def _operator(layer: str) -> str:
    """`layers.3/KvcCompact_41` -> `KvcCompact`: the parser names a layer after its node."""
    named = re.match("[A-Za-z]+", layer.rpartition("/")[2])
    return named.group() if named else layer


def expected_aliases(model: ModelProto) -> dict[str, str]:
    """Output -> input that shares its buffer: every state tensor of a decode graph; none in a prefill graph."""
    inputs = {value.name for value in model.graph.input}
    pairs = {value.name: value.name.replace("_out.", ".", 1) for value in model.graph.output}
    return {output: name for output, name in pairs.items() if output != name and name in inputs}


def updated_in_place(model: ModelProto) -> dict[str, str]:
    """Output -> value whose buffer it shares, of every node of ours: the first one, where several share a buffer."""
    found: dict[str, str] = {}
    for node in model.graph.node:
        operator = OPERATORS.get(node.op_type)
        if operator is None or node.domain != KVC_DOMAIN:
            continue
        operator = operator.for_numbers({attribute.name: attribute.i for attribute in node.attribute})
        inputs = dict(zip((tensor.name for tensor in operator.inputs), node.input, strict=True))
        for tensor, output in zip(operator.outputs, node.output, strict=True):
            if tensor.alias is not None:
                shared = inputs[tensor.alias]
                found[output] = found.get(shared, shared)
    return found


def engine_aliases(engine: Any) -> dict[str, str]:
    """Return the aliases that an ICudaEngine reports: output -> aliased input. It may leave out those of plugins."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    pairs = {name: engine.get_aliased_input_tensor(name) for name in names}
    return {output: name for output, name in pairs.items() if name}


def network_aliases(network: Any) -> dict[str, str]:
    """Return the aliases that the plugins of a parsed network report: output of the network -> input whose buffer it
    shares.

    Before there is an engine, only Python plugins can be asked; others are left out.
    """
    aliases: dict[str, str] = {}
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if layer.type.name == "PLUGIN_V3":
            own = _layer_aliases(layer, sys.modules[type(network).__module__])
            aliases |= {output: aliases.get(source, source) for output, source in own.items()}
    outputs = (network.get_output(index).name for index in range(network.num_outputs))
    return {output: aliases[output] for output in outputs if output in aliases}


def check_aliases(reported: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise UnsupportedEnvironment if an output is reported to share another buffer than the expected one."""
    wrong = [
        f"{output}: expected {expected.get(output, 'a buffer of its own')}, found {source}"
        for output, source in sorted(reported.items())
        if expected.get(output) != source
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UnsupportedEnvironment(
            f"an output shares the wrong buffer: {'; '.join(wrong[:3])}{more}",
            hint="kvc-trt doctor shows the plugin library in use",
        )


def _layer_aliases(layer: Any, trt: Any) -> dict[str, str]:
    layer.__class__ = trt.IPluginV3Layer
    build = layer.plugin.get_capability_interface(trt.PluginCapabilityType.BUILD)
    aliases = {}
    for index in range(layer.num_outputs):
        try:
            source = build.get_aliased_input(index)
        except TypeError:  # a C++ plugin: Python cannot call its methods
            return {}
        if source >= 0:
            aliases[layer.get_output(index).name] = layer.get_input(source).name
    return aliases
