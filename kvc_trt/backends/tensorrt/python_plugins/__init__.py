"""The plugins of plugins_cuda/tensorrt/ once more, in Python: the same fields, types, shapes, aliases and refusals.

They prove graphs where no TensorRT header is, and run engines where the C++ library was not built: `enqueue` calls the
kernels' C ABI on the stream that TensorRT gives. A step that replays a captured CUDA graph runs no Python.

    with register(trt.get_plugin_registry(), trt):
        ... parse, build, run ...

No module of TensorRT is imported here: the caller hands one in.
"""

from __future__ import annotations

from kvc_trt.backends.tensorrt.python_plugins.registration import Registration, register
from kvc_trt.backends.tensorrt.python_plugins.report import last_refusal
from kvc_trt.operators.dimensions import Refusal

__all__ = ["Refusal", "Registration", "last_refusal", "register"]
