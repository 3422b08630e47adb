"""Attention in fp32 may be taken apart.

TensorRT has fused attention for 16-bit types only, and refuses to build an fp32 one unless it may use several kernels,
which keep scores of the size of the prompt squared. For 16-bit types the permission is not given: there a build without
a fused kernel has to fail, not to become slow and large.
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto, helper

from kvc_trt.backends.tensorrt.lowering.target import Target


def let_fp32_attention_decompose(model: ModelProto, target: Target) -> list[str]:
    """Set `TRT_decomposable`, an attribute of NVIDIA's parser, on every Attention of an fp32 graph."""
    caches = [output for output in model.graph.output if output.name.startswith("k_cache")]
    if not caches or caches[0].type.tensor_type.elem_type != TensorProto.FLOAT:
        return []
    attention = [node for node in model.graph.node if node.op_type == "Attention"]
    for node in attention:
        node.attribute.append(helper.make_attribute("TRT_decomposable", 1))
    return [f"fp32: {len(attention)} x Attention without a fused kernel, scores in memory"] if attention else []
