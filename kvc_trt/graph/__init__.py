"""The program of an engine: a prefill and a decode graph in ONNX, their state and their weight file.

Nothing here knows an executor. Importing the package is cheap: onnx is imported by the modules that build graphs.
"""

from __future__ import annotations

PROMPT_BLOCK = 128
"""Prompts are padded on the right to a multiple of this many tokens; one iteration of prefill attention."""

OPSET = 23
"""Runs on every onnxruntime from 1.23 on; TensorScatter and Swish (24) are lowered to older operators."""

IR_VERSION = 11
KVC_DOMAIN = "kvc"
CONTRIB_DOMAIN = "com.microsoft"
