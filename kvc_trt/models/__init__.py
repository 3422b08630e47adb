"""Models: configuration, weights and presets. Nothing here imports torch, onnx or onnxruntime."""

from kvc_trt.models.config import ModelConfig, RopeScaling
from kvc_trt.models.limits import check_length, longest_sequence

__all__ = ["ModelConfig", "RopeScaling", "check_length", "longest_sequence"]
