"""Mixtral (Jiang et al., arXiv 2401.04088): Mistral's parts, with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvc_trt.models.config import Experts, ModelConfig, ModelDescription
from kvc_trt.models.family import Family, GgufArchitecture
from kvc_trt.models.fields.experts import ExpertFields, count_of, stacks_of
from kvc_trt.models.fields.rotary import Base, Length
from kvc_trt.models.gguf.keys import EXPERTS, EXPERTS_OF_A_TOKEN
from kvc_trt.models.weights import ROUTER

_BLOCK = "block_sparse_moe"


class _Fields(ExpertFields):
    rope_theta: Base = 1e6
    sliding_window: Length | None = None


def _describe(fields: _Fields, _given: Mapping[str, Any]) -> Mapping[str, Any]:
    experts = Experts(count_of(fields), fields.num_experts_per_tok, fields.intermediate_size)
    return {"sliding_window": fields.sliding_window, "description": ModelDescription(experts=experts)}


def _fields_of(description: ModelDescription) -> Mapping[str, Any]:
    experts = description.experts
    return {} if experts is None else {"num_local_experts": experts.count, "num_experts_per_tok": experts.chosen}


def _stacks(config: ModelConfig) -> Mapping[str, Sequence[str]]:
    routers = {
        f"model.layers.{layer}.{ROUTER}": [f"model.layers.{layer}.{_BLOCK}.gate.weight"]
        for layer in range(config.num_hidden_layers)
    }
    return {**routers, **stacks_of(config, _BLOCK, ("w1", "w3", "w2"))}


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    fields=_Fields,
    describe=_describe,
    fields_of=_fields_of,
    # Trained with them: an auxiliary loss, and noise that only training adds.
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}),
    absent_kv_heads=8,
    stacks=_stacks,
    gguf=GgufArchitecture(
        ("llama",),
        interleaved=True,
        keys={"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS_OF_A_TOKEN},
        when=lambda keys: bool(keys[EXPERTS]),
    ),
)
