"""Which outputs lie in the buffers of which inputs: what a graph expects, and what a network or an engine reports.

A cache that is not updated in place is a copy of the whole cache in every layer of every step, and an executor that
binds one buffer to both ends would read what it writes. TensorRT does not object to a missing alias, so it is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from onnx import ModelProto

from kvc_trt.errors import UnsupportedEnvironment


def expected_aliases(model: ModelProto) -> dict[str, str]:
    """Output -> input that shares its buffer: every state tensor of a decode graph; none in a prefill graph."""
    inputs = {value.name for value in model.graph.input}
    pairs = {value.name: value.name.replace("_out.", ".", 1) for value in model.graph.output}
    return {output: name for output, name in pairs.items() if output != name and name in inputs}


def engine_aliases(engine: Any) -> dict[str, str]:
    """What an ICudaEngine reports: output -> aliased input."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    pairs = {name: engine.get_aliased_input_tensor(name) for name in names}
    return {output: name for output, name in pairs.items() if name}


def network_aliases(network: Any) -> dict[str, str]:
    """What the plugins of a parsed network report, output -> aliased input.

    Only plugins that are written in Python can be asked before there is an engine; of others nothing is reported.
    """
    aliases: dict[str, str] = {}
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if layer.type.name == "PLUGIN_V3":
            aliases |= _layer_aliases(layer, sys.modules[type(network).__module__])
    return aliases


def check_aliases(reported: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise UnsupportedEnvironment unless exactly the expected outputs lie in the buffers of their inputs."""
    wrong = [
        f"{output}: expected the buffer of {expected.get(output, 'its own')}, found {reported.get(output, 'its own')}"
        for output in sorted({*expected, *reported})
        if expected.get(output) != reported.get(output)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UnsupportedEnvironment(
            f"state is not updated in place: {'; '.join(wrong[:3])}{more}",
            hint="kvc-trt doctor shows the plugin library in use",
        )


def _layer_aliases(layer: Any, trt: Any) -> dict[str, str]:
    layer.__class__ = trt.IPluginV3Layer
    build = layer.plugin.get_capability_interface(trt.PluginCapabilityType.BUILD)
    aliases = {}
    for index in range(layer.num_outputs):
        try:
            source = build.get_aliased_input(index)
        except TypeError:  # a plugin in C++: the binding offers its methods to TensorRT alone
            return {}
        if source >= 0:
            aliases[layer.get_output(index).name] = layer.get_input(source).name
    return aliases
