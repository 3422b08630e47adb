"""Presets that every executor takes: decoders of Llama's parts, whose checkpoints have Llama's names."""

from __future__ import annotations

from kvc_trt.models.config import ModelDescription, longest_compressible
from kvc_trt.models.presets import list_presets, load_preset


def dense_presets() -> list[str]:
    """Return the presets without parts of their own: experts, sliding and linear layers, parallel blocks.

    Where every layer slides, sequences within the window have none of them.
    """
    return [name for name in list_presets() if _is_dense(name)]


def _is_dense(name: str) -> bool:
    model = load_preset(name).config
    return model.description == ModelDescription() and model.windows(longest_compressible(model)) is None
