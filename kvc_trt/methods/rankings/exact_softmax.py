"""The softmax of attention in float64: exact logits under caps and sinks."""

from __future__ import annotations

import numpy as np

from kvc_trt.methods.rankings.rounding import Float64
from kvc_trt.reference.softmax import Softmax


def capped(logits: Float64, softmax: Softmax) -> Float64:
    """Return logits of any shape under the cap."""
    found: Float64 = logits if softmax.cap is None else np.tanh(logits / softmax.cap) * softmax.cap
    return found


def slope_of_cap(logits: Float64, softmax: Softmax) -> Float64:
    """Return the slope of the cap at each logit before it, at most 1."""
    found: Float64 = np.ones_like(logits) if softmax.cap is None else 1 - np.tanh(logits / softmax.cap) ** 2
    return found


def sink_logits(softmax: Softmax) -> Float64:
    """Return the sinks of g heads, [g]; -inf for each of any number of heads, [1], if there are none."""
    if softmax.sinks is None:
        return np.array([-np.inf])
    found: Float64 = softmax.sinks.numpy().astype(np.float64)
    return found
