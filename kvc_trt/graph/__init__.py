"""An engine's prefill and decode graph in ONNX, their state tensors and their weight file.

Nothing here depends on an executor. Importing the package is cheap: only the modules that build graphs import onnx.
"""

from __future__ import annotations

IR_VERSION = 11
