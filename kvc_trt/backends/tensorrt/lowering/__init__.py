"""Lower an ONNX graph to what NVIDIA's parser reads: a list of passes, in memory, without weights.

lowered = lower(onnx.load("engine/decode.onnx", load_external_data=False), tensorrt=(11, 4), plugins=PLUGINS)
... parse lowered.SerializeToString() into `network` ...
check_network(network, lowered)
... build and open `engine` ...
check_aliases(engine_aliases(engine), expected_aliases(lowered))
"""

from __future__ import annotations

from kvc_trt.backends.tensorrt.lowering.checks import (
    check_aliases,
    check_attention_layers,
    check_network,
    check_plugin_layers,
    engine_aliases,
    expected_aliases,
    expected_attention,
    expected_masks,
    expected_plugins,
    network_aliases,
    plugin_layers,
    updated_in_place,
)
from kvc_trt.backends.tensorrt.lowering.operators import PLUGINS
from kvc_trt.backends.tensorrt.lowering.passes import PASSES, Lowered, lower, lower_with_notes

__all__ = [
    "PASSES",
    "PLUGINS",
    "Lowered",
    "check_aliases",
    "check_attention_layers",
    "check_network",
    "check_plugin_layers",
    "engine_aliases",
    "expected_aliases",
    "expected_attention",
    "expected_masks",
    "expected_plugins",
    "lower",
    "lower_with_notes",
    "network_aliases",
    "plugin_layers",
    "updated_in_place",
]
