"""The plugins of plugins_cuda/tensorrt/ in Python, with the same fields, types, shapes, aliases and refusals.

They check graphs without TensorRT's headers, and run engines without the C++ library: `enqueue` calls the kernels' C
ABI on TensorRT's stream. A step that replays a captured CUDA graph runs no Python.

    with register(trt.get_plugin_registry(), trt):
        ... parse, build, run ...

Nothing here imports TensorRT: the caller passes the module.
"""

from __future__ import annotations

from kvc_trt.backends.tensorrt.python_plugins.registration import Registration, register
from kvc_trt.backends.tensorrt.python_plugins.report import last_refusal
from kvc_trt.operators.dimensions import Refusal

__all__ = ["Refusal", "Registration", "last_refusal", "register"]
