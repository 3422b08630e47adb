"""The graphs of an engine that copy its weights into the kernels' own layout; the others read the mapped file."""

from __future__ import annotations

from kvc_trt.backends.onnxruntime.native import NativeOperators
from kvc_trt.operators.native import NATIVE_NARROW_LINEAR
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR

PREPACK_UP_TO_BYTES = 1 << 30
"""Float weights up to this size are copied into the kernels' own layout for decode; larger ones stay mapped.

Measured on 620 MB of weights, one thread: a step of 8 rows takes 27% less, a step of one row and prefill gain nothing.
"""


def steps_pack(size: float, *, quantised: bool, native: NativeOperators | None) -> bool:
    """Return whether steps copy weights of `size` bytes.

    ONNX Runtime's own quantised product must: a step takes 50 times as long otherwise. Native ones read the file.
    """
    if quantised:
        return native is None or QUANTISED_LINEAR.name not in native.operators
    return size <= PREPACK_UP_TO_BYTES


def passes_pack(steps: bool, *, quantised: bool, native: NativeOperators | None) -> bool:
    """Return whether passes over drafts make a copy of their own, where `steps` says whether steps make one.

    Native products of a few tokens read the file.
    """
    reads_file = native is not None and NATIVE_NARROW_LINEAR in native.operators and not quantised
    return steps and not reads_file
