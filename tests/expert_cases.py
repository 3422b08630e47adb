"""Shapes and calls of the operators of experts, for tests of their bodies and of native operators."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from onnx import FunctionProto

from kvc_trt.models.config import ClampedGate, Experts
from kvc_trt.models.quantisation import BLOCK
from kvc_trt.operators.experts import (
    CLAMPED_EXPERTS,
    EXPERTS,
    QUANTISED_CLAMPED_EXPERTS,
    QUANTISED_EXPERTS,
)
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.verify.rungs.parts.experts import ExpertCase

BITS = (None, 4, 8)


CLAMPED = (None, ClampedGate(0.7, 1.702))
"""The gate of SwiGLU, and a clamped one whose limit many numbers of a case exceed."""


@cache
def body_of(bits: int | None, *, clamped: bool = False) -> FunctionProto:
    """Return the body of the operator on matrices of floats (None), or of 4 or 8 bits."""
    plain, quantised = (CLAMPED_EXPERTS, QUANTISED_CLAMPED_EXPERTS) if clamped else (EXPERTS, QUANTISED_EXPERTS)
    return (plain if bits is None else quantised).body(Layout(HeadShape(4, 2, 16)))


def numbers_of(case: ExpertCase, *, wide: bool = False) -> dict[str, int]:
    """Return the attributes of a call; with `wide`, native operators round its input to 15 bits."""
    numbers = {"chosen": case.part.chosen, "normalised": int(case.part.normalised)}
    return numbers if case.bits is None else {**numbers, "bits": case.bits, "block": BLOCK, "wide_input": int(wide)}


def experts() -> st.SearchStrategy[Experts]:
    """Up to seven experts, of which some or all compute a token."""
    return st.integers(1, 7).flatmap(
        lambda count: st.builds(
            Experts, st.just(count), st.integers(1, count), st.sampled_from((32, 64)), normalised=st.booleans()
        )
    )
