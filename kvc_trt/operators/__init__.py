"""The `kvc` operators: ONNX model-local functions made of standard operators, one per file.

Every call carries plugin_namespace and plugin_version, so that a TensorRT build replaces the node by a CUDA plugin. It
names every input and lists every output. The bodies are the executable specification of those plugins. Importing the
package is cheap: only the modules that write graphs import onnx.
"""

from __future__ import annotations

KVC_DOMAIN = "kvc"
CONTRIB_DOMAIN = "com.microsoft"
"""Operators of ONNX Runtime's own; only bodies that no other executor reads use them."""

OPSET = 23
"""Supported by onnxruntime 1.23 and later; TensorScatter and Swish (opset 24) are lowered to older operators."""

PROMPT_BLOCK = 128
"""Prompts are padded on the right to a multiple of this many tokens, one iteration of prefill attention."""
