"""From the one ONNX artefact to what NVIDIA's parser reads: a list of passes, in memory, without weights.

lowered = lower(onnx.load("engine/decode.onnx", load_external_data=False), tensorrt=(11, 4), plugins=OPERATORS)
... parse lowered.SerializeToString() into `network` ...
check_network(network, lowered)
... build and open `engine` ...
check_aliases(engine_aliases(engine), expected_aliases(lowered))
"""

from typing import Any

from onnx import ModelProto

from kvc_trt.backends.tensorrt.lowering.aliases import check_aliases, engine_aliases, expected_aliases, network_aliases
from kvc_trt.backends.tensorrt.lowering.counting import (
    check_attention_layers,
    check_plugin_layers,
    expected_attention,
    expected_plugins,
    plugin_layers,
)
from kvc_trt.backends.tensorrt.lowering.passes import PASSES, Lowered, lower, lower_with_notes
from kvc_trt.backends.tensorrt.lowering.plugin_nodes import OPERATORS

__all__ = [
    "OPERATORS",
    "PASSES",
    "Lowered",
    "check_aliases",
    "check_attention_layers",
    "check_network",
    "check_plugin_layers",
    "engine_aliases",
    "expected_aliases",
    "expected_attention",
    "expected_plugins",
    "lower",
    "lower_with_notes",
    "network_aliases",
    "plugin_layers",
]


def check_network(network: Any, lowered: ModelProto) -> None:
    """Everything that can be asked of a network behind the parser: plugin layers and fused attention, by number."""
    check_plugin_layers(network, expected_plugins(lowered))
    check_attention_layers(network, expected_attention(lowered))
