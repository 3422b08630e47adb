"""The program of an engine: a prefill and a decode graph in ONNX, their state and their weight file.

Nothing here knows an executor. Importing the package is cheap: onnx is imported by the modules that build graphs.
"""

from __future__ import annotations

IR_VERSION = 11
CONTRIB_DOMAIN = "com.microsoft"
