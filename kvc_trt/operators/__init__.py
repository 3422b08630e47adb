"""The `kvc` operators: ONNX model-local functions of standard operators, one per file.

Every call carries plugin_namespace and plugin_version (a TensorRT build replaces the node by a CUDA plugin), names
every input and lists every output. The bodies are the executable specification of those plugins. Importing the package
is cheap: onnx is imported by the modules that write graphs.
"""

from __future__ import annotations

KVC_DOMAIN = "kvc"

OPSET = 23
"""Runs on every onnxruntime from 1.23 on; TensorScatter and Swish (24) are lowered to older operators."""

PROMPT_BLOCK = 128
"""Prompts are padded on the right to a multiple of this many tokens; one iteration of prefill attention."""
