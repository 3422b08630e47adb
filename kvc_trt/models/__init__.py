"""Models: configuration, weights and presets. Nothing here imports torch, onnx or onnxruntime."""

from typing import TYPE_CHECKING

from kvc_trt.lazy import lazy_names
from kvc_trt.models.config import ModelConfig, RopeScaling, check_length, longest_compressible

if TYPE_CHECKING:
    from kvc_trt.models.presets import Preset, list_presets, load_preset
else:
    __getattr__ = lazy_names(
        __name__, dict.fromkeys(("Preset", "list_presets", "load_preset"), "kvc_trt.models.presets")
    )

__all__ = [
    "ModelConfig",
    "Preset",
    "RopeScaling",
    "check_length",
    "list_presets",
    "load_preset",
    "longest_compressible",
]
