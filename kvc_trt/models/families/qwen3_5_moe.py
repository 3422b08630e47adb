"""Qwen3.5's text model with experts (Qwen, 2026): the layers of the dense one, with experts in each of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvc_trt.models.families.qwen3_5 import gguf_places, separate_matrices
from kvc_trt.models.families.qwen3_next import describe, fields_of, gguf_fields
from kvc_trt.models.family import BesideImages, Count, Family, GgufArchitecture
from kvc_trt.models.fields.experts import QWEN_GGUF_KEYS, QwenExpertFields, qwen_stacks_of
from kvc_trt.models.fields.linear import LinearFields
from kvc_trt.models.gguf.keys import LATER_TOKENS
from kvc_trt.models.gguf.linear_layers import LINEAR_KEYS
from kvc_trt.models.gguf.names import NORM_BEFORE_FEED_FORWARD
from kvc_trt.models.sources.fused_experts import gate_above_up

_Size = Annotated[int, Field(ge=1, le=1 << 20)]


class _Fields(LinearFields, QwenExpertFields):
    intermediate_size: _Size = 512  # of no layer: all have experts
    moe_intermediate_size: _Size = 512
    shared_expert_intermediate_size: _Size = 512
    num_experts: Count | None = 256
    num_experts_per_tok: Count = 8
    # transformers knows no other values.
    norm_topk_prob: Literal[True] = True
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: Annotated[list[int], Field(max_length=0)] | None = None


QWEN3_5_MOE = Family(
    architecture="Qwen3_5MoeForCausalLM",
    fields=_Fields,
    describe=describe,
    fields_of=fields_of,
    # Trained with them: an auxiliary loss.
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    absent_kv_heads=2,
    absent_head_size=256,
    rotary_fraction=0.25,
    weights=separate_matrices,
    # Published checkpoints have the experts of a layer in one tensor, and transformers writes one tensor for each.
    stacks=qwen_stacks_of,
    other_form=gate_above_up,
    beside_images=BesideImages("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    gguf=GgufArchitecture(
        ("qwen35moe",),
        keys=QWEN_GGUF_KEYS | LINEAR_KEYS,
        fields=gguf_fields,
        reads=frozenset({LATER_TOKENS}),
        tensors=lambda _config: NORM_BEFORE_FEED_FORWARD,
        weights=gguf_places,
    ),
)
