"""The interface on which kvc-trt and a library of native operators (plugins_cpu/) have to agree."""

from __future__ import annotations

import hashlib
from functools import cache

from kvc_trt.operators.schema import Operator

REVISION = 3
"""Rises when a function of the library, or what an operator's attributes mean, changes: schemas do not show that."""

NATIVE_LINEAR = "KvcLinear"
"""The native operator that stands for Gemm with a constant matrix. It is in no file, so it has no body: Gemm is its
specification."""
NATIVE_NARROW_LINEAR = "KvcNarrowLinear"
"""The same for a few tokens: it takes little more time than reading the matrix once."""


@cache
def interface() -> int:
    """Return the number of the interface, 0 to 2^31 - 1: a digest of the revision and the schemas it can have."""
    from kvc_trt.operators.registry import OPERATORS  # which imports every module of this package, this one too

    text = repr((REVISION, [_schema(operator) for operator in OPERATORS.values() if operator.native]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _schema(operator: Operator) -> tuple[object, ...]:
    operator = operator.with_lengths()
    tensors = [
        [(tensor.name, tensor.element, tensor.shape, tensor.alias, tensor.optional) for tensor in side]
        for side in (operator.inputs, operator.outputs)
    ]
    attributes = [(attribute.name, attribute.least, attribute.most) for attribute in operator.attributes]
    return operator.name, tensors, attributes
