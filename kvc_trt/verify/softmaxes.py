"""The softmax of each layer of an engine, in the reference's form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvc_trt.models.weights import SINKS
from kvc_trt.reference.softmax import Softmax

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory


def softmaxes(engine: EngineDirectory) -> list[Softmax]:
    """Return the softmax of every layer, with the engine's own sinks."""
    parts, layers = engine.model.description, range(engine.model.num_hidden_layers)
    if not parts.attention_sinks:
        return [Softmax(parts.attention_softcap)] * len(layers)
    weights = engine.weights()
    sinks = (weights.read(f"model.layers.{layer}.{SINKS}").astype(np.float32) for layer in layers)
    return [Softmax(parts.attention_softcap, torch.from_numpy(own)) for own in sinks]
