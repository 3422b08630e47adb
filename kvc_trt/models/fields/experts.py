"""The fields of config.json that describe experts, which families with experts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.models.config import Experts, ModelConfig, ModelDescription
from kvc_trt.models.family import Count, DecoderFields
from kvc_trt.models.gguf.keys import EXPERTS, EXPERTS_OF_A_TOKEN, GgufKeys
from kvc_trt.models.weights import EXPERT_MATRICES


class ExpertFields(DecoderFields):
    """The number of experts, under either of its names, and how many of them compute a token."""

    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count


class QwenExpertFields(ExpertFields):
    """The fields that Qwen2-MoE and Qwen3-MoE share."""

    moe_intermediate_size: Annotated[int, Field(ge=1, le=1 << 20)]
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[Annotated[int, Field(ge=0, le=1023)]] | None = None


def experts_of(fields: QwenExpertFields, shared_size: int = 0) -> Experts:
    """Return the experts of a Qwen model; ValueError for numbers that do not fit."""
    count = count_of(fields)
    only, step = set(fields.mlp_only_layers or ()), fields.decoder_sparse_step
    dense = tuple(layer for layer in range(fields.num_hidden_layers) if layer in only or (layer + 1) % step)
    if len(dense) == fields.num_hidden_layers:
        raise ValueError("mlp_only_layers and decoder_sparse_step leave no layer with experts")
    return Experts(
        count=count, chosen=fields.num_experts_per_tok, size=fields.moe_intermediate_size,
        normalised=fields.norm_topk_prob, shared_size=shared_size, dense_layers=dense,
    )  # fmt: skip


def count_of(fields: ExpertFields) -> int:
    """Return the number of experts; ValueError if it is missing, contradictory or too small."""
    given = [count for count in (fields.num_experts, fields.num_local_experts) if count is not None]
    if not given:
        raise ValueError("num_experts is missing, expected the number of experts")
    count = given[0]
    if given != [count] * len(given):
        raise ValueError(f"num_experts is {count} and num_local_experts {given[1]}, expected one number of experts")
    if fields.num_experts_per_tok > count:
        raise ValueError(f"num_experts_per_tok is {fields.num_experts_per_tok}, expected at most the {count} experts")
    return count


def qwen_fields_of(description: ModelDescription) -> Mapping[str, Any]:
    """Return the fields of config.json from which `experts_of` reads these experts."""
    experts = description.experts
    if experts is None:
        return {}
    shared = {"shared_expert_intermediate_size": experts.shared_size} if experts.shared_size else {}
    return shared | {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.normalised,
        "mlp_only_layers": list(experts.dense_layers),
    }


QWEN_GGUF_KEYS = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_OF_A_TOKEN}


def qwen_fields_of_gguf(keys: GgufKeys) -> Mapping[str, Any]:
    """Return the width of an expert of a GGUF file: the first files do not state it, and their tensors do."""
    return {"moe_intermediate_size": keys.rows("blk.0.ffn_gate_exps.weight", 1)}


def stacks_of(config: ModelConfig, block: str, matrices: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return where a checkpoint has the experts' matrices: `BLOCK.experts.E.MATRIX.weight` of a layer's expert E.

    `matrices` are its names of gate, up and down.
    """
    return {
        f"model.layers.{layer}.{ours}": [
            f"model.layers.{layer}.{block}.experts.{expert}.{theirs}.weight" for expert in range(experts.count)
        ]
        for layer in range(config.num_hidden_layers)
        if (experts := config.experts(layer)) is not None
        for ours, theirs in zip(EXPERT_MATRICES, matrices, strict=True)
    }


def qwen_stacks_of(config: ModelConfig) -> Mapping[str, Sequence[str]]:
    """Return where a Qwen checkpoint has the experts' matrices."""
    return stacks_of(config, "mlp", ("gate_proj", "up_proj", "down_proj"))
