"""The interface on which kvc-trt and a library of native operators (plugins_cpu/) have to agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS, CacheFormat, format_of_code
from kvc_trt.operators.schema import CACHE_FORMAT, SOFTMAX, Element, Operator, Tensor
from kvc_trt.operators.tensors import FP8_BOUNDS

REVISION = 4
"""Rises when a function of the library, or the meaning of an operator's attributes, changes: schemas do not show
that."""

NATIVE_LINEAR = "KvcLinear"
"""The native operator that stands for Gemm with a constant matrix. It is in no file, so it has no body: Gemm is its
specification."""
NATIVE_NARROW_LINEAR = "KvcNarrowLinear"
"""A float32 product for a few tokens: it takes little more time than reading the matrix once."""


def native_name(operator: str, attributes: Mapping[str, int]) -> str:
    """Return the name of the native operator that computes a call of `operator` with these attributes.

    ONNX Runtime wants fixed types and numbers of tensors for each name, so every cache format has names of its own, and
    so have bounds in fp8: KvcHybridAttention_int8_fp8_bounds.
    """
    form = format_of_code(attributes.get(CACHE_FORMAT.name, 0))
    parts = [] if form.name == AUTO else [form.name]
    if attributes.get(FP8_BOUNDS.name, 0):
        parts.append(FP8_BOUNDS.name)
    if attributes.get(SOFTMAX.name, 0):
        parts.append(SOFTMAX.name)  # of which the library has none
    return "_".join([operator, *parts])


@cache
def interface() -> int:
    """Return the number of the interface, 0 to 2^31 - 1: a digest of the revision and the schemas it can have."""
    from kvc_trt.operators.registry import OPERATORS  # which imports every module of this package, this one too

    made = [variant for operator in OPERATORS.values() if operator.native for variant in variants(operator)]
    text = repr((REVISION, [_schema(variant) for variant in made]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class NativeOperator:
    """An operator for calls with some attributes, which need a native operator of their own."""

    name: str
    operator: Operator
    form: CacheFormat
    fp8_bounds: bool

    def element_of(self, tensor: Tensor) -> Element:
        """Return the element type of one of its tensors."""
        return self.operator.element_of(tensor, {FP8_BOUNDS.name: self.fp8_bounds})


def variants(operator: Operator) -> list[NativeOperator]:
    """Return the operator for each cache format and each type of bounds; the first is that of the activations' type."""
    forms = CACHE_FORMATS.values() if operator.stores else [CACHE_FORMATS[AUTO]]
    bounds = [False, True] if FP8_BOUNDS in operator.attributes else [False]
    made = []
    for form in forms:
        for fp8 in bounds:
            name = native_name(operator.name, {CACHE_FORMAT.name: form.code, FP8_BOUNDS.name: fp8})
            made.append(NativeOperator(name, operator.in_format(form).whole, form, fp8))
    return made


def _schema(variant: NativeOperator) -> tuple[object, ...]:
    operator = variant.operator
    tensors = [
        [(tensor.name, variant.element_of(tensor), tensor.shape, tensor.alias, tensor.optional) for tensor in side]
        for side in (operator.inputs, operator.outputs)
    ]
    attributes = [(attribute.name, attribute.least, attribute.most) for attribute in operator.attributes]
    return variant.name, tensors, attributes
