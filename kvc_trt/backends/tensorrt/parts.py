"""The parts of a model for which TensorRT has no kernel of ours: asked of a model before a build, and of its graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig

EXPERTS = "kernel for feed-forward blocks of experts"
SOFTMAX = "kernel for attention with capped logits or sinks"


def missing_part(model: ModelConfig) -> str | None:
    """Return the kernel that the model needs and that does not exist; None if all exist."""
    description = model.description
    if description.experts is not None:
        return EXPERTS
    return SOFTMAX if description.attention_softcap is not None or description.attention_sinks else None
