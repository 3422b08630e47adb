"""The fields of config.json that describe linear layers (Gated DeltaNet), and the places of weights beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from kvc_trt.models.config import Attention, Linear, ModelConfig, ModelDescription
from kvc_trt.models.family import Count, DecoderFields
from kvc_trt.models.family_weights import Rows

_Size = Annotated[int, Field(ge=1, le=1024)]
LINEAR_FIELDS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_size",
    "linear_value_head_dim": "value_size",
    "linear_conv_kernel_dim": "kernel",
}
"""Fields of config.json -> those of `Linear`."""


class LinearFields(DecoderFields):
    """The fields that Qwen3-Next and Qwen3.5 share; the defaults are those of transformers."""

    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-6
    attention_bias: bool = False
    layer_types: list[Literal["full_attention", "linear_attention"]] | None = None
    full_attention_interval: Annotated[int, Field(ge=1)] = 4
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_key_head_dim: _Size = 128
    linear_value_head_dim: _Size = 128
    linear_conv_kernel_dim: Annotated[int, Field(ge=2, le=64)] = 4


def attention_by_layer(fields: LinearFields) -> tuple[Attention, ...]:
    """Return the attention of each layer: linear, or full with a gate. ValueError for fields that do not fit.

    Without `layer_types`, the last of `full_attention_interval` layers is full.
    """
    layers, every = fields.num_hidden_layers, fields.full_attention_interval
    kinds = fields.layer_types or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} names, expected one for each of {layers} layers")
    if "full_attention" not in kinds:
        raise ValueError("layer_types has no full_attention, expected a layer with a cache")
    part = Linear(**{ours: getattr(fields, theirs) for theirs, ours in LINEAR_FIELDS.items()})
    if part.value_heads % part.key_heads:
        raise ValueError(
            f"linear_num_value_heads is {part.value_heads}, expected a multiple of linear_num_key_heads "
            f"({part.key_heads})"
        )
    full = Attention(gated=True)
    return tuple(full if kind == "full_attention" else Attention(linear=part) for kind in kinds)


def fields_of_attention(description: ModelDescription) -> dict[str, Any]:
    """Return the fields of config.json from which `attention_by_layer` reads this description."""
    kinds = ["full_attention" if one.linear is None else "linear_attention" for one in description.attention]
    part = next((one.linear for one in description.attention if one.linear is not None), None)
    numbers = {} if part is None else {theirs: getattr(part, ours) for theirs, ours in LINEAR_FIELDS.items()}
    return {"layer_types": kinds, **numbers}


def shared_places(config: ModelConfig) -> dict[str, Rows]:
    """Return the places of norms, which multiply by one more than their weight, and of queries beside their gates."""
    places = {"model.norm.weight": Rows("model.norm.weight", plus=1.0)}
    heads, size = config.num_attention_heads, config.head_size
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        names = ["input_layernorm", "post_attention_layernorm"]
        if config.attention(layer).linear is None:
            names += ["self_attn.q_norm", "self_attn.k_norm"]
            for part in ("weight", "bias") if config.qkv_bias else ("weight",):
                joined = f"{prefix}.self_attn.q_proj.{part}"
                for name, start in (("q_proj", 0), ("gate_proj", size)):
                    places[f"{prefix}.self_attn.{name}.{part}"] = Rows(joined, start, size, heads, 2 * size)
        places |= {f"{prefix}.{name}.weight": Rows(f"{prefix}.{name}.weight", plus=1.0) for name in names}
    return places


def described(fields: LinearFields) -> Mapping[str, Any]:
    """Return the fields of `ModelConfig` that both families share, but for the description."""
    return {"qk_norm": True, "qkv_bias": fields.attention_bias, "output_bias": fields.attention_bias}
