"""The plugins of plugins_cuda/tensorrt/ once more, in Python: the same fields, types, shapes, aliases and refusals.

They prove graphs where no TensorRT header is, and run engines where the C++ library was not built: `enqueue` calls the
kernels' C ABI on the stream that TensorRT gives. Under a captured CUDA graph no Python is on the way of a decode step.

    with register(trt.get_plugin_registry(), trt):
        ... parse, build, run ...

No module of TensorRT is imported here: the caller hands one in.
"""

from __future__ import annotations

from kvc_trt.backends.tensorrt.twins.compact import COMPACT
from kvc_trt.backends.tensorrt.twins.dense_attention import DENSE_ATTENTION
from kvc_trt.backends.tensorrt.twins.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.backends.tensorrt.twins.registration import OPERATORS, Registration, register
from kvc_trt.backends.tensorrt.twins.report import Refusal, last_refusal

__all__ = [
    "COMPACT",
    "DENSE_ATTENTION",
    "HYBRID_ATTENTION",
    "OPERATORS",
    "Refusal",
    "Registration",
    "last_refusal",
    "register",
]
