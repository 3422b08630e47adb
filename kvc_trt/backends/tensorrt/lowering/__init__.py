"""From the one ONNX artefact to what NVIDIA's parser reads: a list of passes, in memory, without weights.

lowered = lower(onnx.load("engine/decode.onnx", load_external_data=False), tensorrt=(11, 4), plugins=OPERATORS)
... parse lowered.SerializeToString() into `network` ...
check_plugin_layers(network, expected_plugins(lowered))
"""

from kvc_trt.backends.tensorrt.lowering.counting import check_plugin_layers, expected_plugins
from kvc_trt.backends.tensorrt.lowering.passes import PASSES, Lowered, lower, lower_with_notes
from kvc_trt.backends.tensorrt.lowering.plugin_nodes import OPERATORS

__all__ = [
    "OPERATORS",
    "PASSES",
    "Lowered",
    "check_plugin_layers",
    "expected_plugins",
    "lower",
    "lower_with_notes",
]
