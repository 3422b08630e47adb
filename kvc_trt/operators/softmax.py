"""The softmax of attention in the bodies of operators: a cap of the logits, and sinks in the denominator.

A call says by its attribute `softmax` which of them it has. The cap is a number of the engine (`Layout.softmax`), as
those are that no attribute can hold; the sinks are an input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

SINK_LOGITS = "sink_logits"
"""The name of the input [H]."""
CAPPED, WITH_SINKS = 1, 2
"""The bits of the attribute."""


@dataclass(frozen=True)
class SoftmaxForm:
    """The softmax of all layers of an engine: caps and sinks; the default is the plain softmax."""

    cap: float | None = None
    """A logit l becomes cap tanh(l / cap)."""
    sinks: bool = False
    """True if the exponential of each query head's own logit is part of the denominator."""

    @property
    def code(self) -> int:
        """The attribute of calls."""
        return CAPPED * (self.cap is not None) + WITH_SINKS * self.sinks

    def capped(self, emit: Emitter, logits: Value) -> Value:
        """Return FLOAT logits of any shape under the cap."""
        if self.cap is None:
            return logits
        return str(emit.Mul(emit.Tanh(emit.Div(logits, float(self.cap))), float(self.cap)))

    def grouped_sinks(self, emit: Emitter, keys: Value, axes: int) -> Value | None:
        """Return the sinks by the KV heads of `keys` [B,G,...], FLOAT [G,g,1,...] with `axes` axes of length 1.

        None if there are none."""
        import numpy as np

        if not self.sinks:
            return None
        shape = emit.Concat(emit.Shape(keys, start=1, end=2), [-1] + [1] * axes, axis=0)
        return str(emit.Reshape(emit.cast(SINK_LOGITS, np.float32), shape))


PLAIN = SoftmaxForm()


def probabilities(emit: Emitter, logits: Value, sinks: Value | None) -> Value:
    """Normalise capped and masked FLOAT logits over their last axis; `sinks` are as wide as 1 there, None for none."""
    if sinks is None:
        return str(emit.Softmax(logits, axis=-1))
    weights, total = weights_and_total(emit, logits, sinks)
    return str(emit.Div(weights, emit.Add(emit.ReduceSum(weights, [-1], keepdims=1), total)))


def weights_and_total(emit: Emitter, logits: Value, sinks: Value) -> tuple[Value, Value]:
    """Return the exponentials of logits and of sinks, over that of the largest of both along the last axis."""
    largest = emit.Max(emit.ReduceMax(logits, [-1], keepdims=1), sinks)
    return emit.Exp(emit.Sub(logits, largest)), emit.Exp(emit.Sub(sinks, largest))
