"""The dense engine that a compressed one is compared with: same weights, same lengths, nothing evicted or skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvc_trt.graph.weights import GraphWeights


def build_twin_prefill(config: ModelConfig, parameters: PolicyParameters, *, weights: GraphWeights) -> ModelProto:
    """The twin's prefill graph; its state tensors are those of `parameters.keeping_everything()`."""
    from kvc_trt.graph.build import build_prefill

    return build_prefill(config, parameters.keeping_everything(), weights=weights)


def build_twin_decode(config: ModelConfig, parameters: PolicyParameters, *, weights: GraphWeights) -> ModelProto:
    """The twin's decode graph: bit-identical to the engine's as long as every row fits the engine's dense limit."""
    from kvc_trt.graph.build import build_decode, slice_limit

    return build_decode(config, parameters.keeping_everything(), weights=weights, slice_until=slice_limit(parameters))
