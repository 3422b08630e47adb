"""`ModelConfig` <-> the `pretrained_config` section of an engine's config.json (TensorRT-LLM's field names).

Reading goes through the validation of Hugging Face configurations, so an engine's file is trusted no more than theirs.
A decoder with other parts than Llama's has a section more, `description`. The family says what the parts are, and the
file must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.models.config import LongRope, ModelConfig, ModelDescription, RotaryScaling, Yarn
from kvc_trt.models.family import ACTIVATIONS, Count, families
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.validation import ForeignSchema, validated, validated_document

SPELLING = {
    "head_dim": "head_size",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "rope_scaling": "rotary_scaling",
    "eos_token_id": "eos_token_ids",
    "architectures": "architecture",
}
"""Hugging Face's field name -> TensorRT-LLM's, where they differ."""
_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


class _PretrainedConfig(ForeignSchema):
    """The fields that follow from the architecture; the others are validated as Hugging Face's."""

    architecture: str
    num_hidden_layers: Count
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_window: Any = None


def to_pretrained_config(config: ModelConfig) -> dict[str, Any]:
    """Return every field of the configuration, and the constants that TensorRT-LLM's readers expect."""
    described = {} if config.description == ModelDescription() else {"description": asdict(config.description)}
    return described | {
        "architecture": config.architecture,
        "dtype": config.dtype,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": config.head_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "hidden_act": _ACTIVATIONS[config.description.feed_forward.activation],
        "norm_epsilon": config.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_base": config.rotary_base,
        "rotary_scaling": None if config.rotary_scaling is None else _rope_scaling(config.rotary_scaling),
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_bias": config.qkv_bias,
        "output_bias": config.output_bias,
        "qk_norm": config.qk_norm,
        "sliding_window": config.sliding_window,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
    }


def from_pretrained_config(mapping: Mapping[str, Any], source: str) -> ModelConfig:
    """The inverse of `to_pretrained_config`; every field but `mapping` and `quantization` is validated."""
    fields = validated(_PretrainedConfig, mapping, source)
    described = validated_document(ModelDescription, mapping.get("description", {}), f"{source}: description")
    translated = {ours: mapping[theirs] for ours, theirs in SPELLING.items() if theirs in mapping}
    translated |= {name: value for name, value in mapping.items() if name not in SPELLING.values()}
    translated["architectures"] = [fields.architecture]
    translated.setdefault("sliding_window", None)
    translated["attention_bias"] = fields.qkv_bias
    translated["mlp_bias"] = described.feed_forward.bias
    windows = (fields.sliding_window, *(one.window for one in described.attention))
    translated["use_sliding_window"] = any(window is not None for window in windows)
    if isinstance(scaling := mapping.get("rotary_scaling"), Mapping):
        translated["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
    family = families().get(fields.architecture)
    if family is not None:
        if fields.sliding_window is not None and "layer_types" in family.fields.model_fields:
            translated["layer_types"] = ["sliding_attention"] * fields.num_hidden_layers
        if family.rotary_fraction is not None:
            translated["partial_rotary_factor"] = _share(described.rotary_channels, mapping.get("head_size"))
        translated |= family.fields_of(described)
        translated = {family.spelling.get(name, name): value for name, value in translated.items()}
    config = parse_config(translated, source, spelling=SPELLING)
    for name, found in fields.model_dump(exclude={"architecture"}).items():
        if (expected := getattr(config, name)) != found:
            raise InputError(f"{source}: {name} is {describe(found)}, expected {expected} for {config.architecture}")
    _check_parts(asdict(described), asdict(config.description), f"{source}: description", config.architecture)
    return config


def _share(channels: int | None, head_size: object) -> float:
    """Return the share of a head's channels that rotate; half a channel more, so that it is not rounded to one less."""
    if channels is None or type(head_size) is not int or not 0 < channels < head_size:
        return 1.0
    return (channels + 0.5) / head_size


def _check_parts(found: Any, expected: Any, where: str, architecture: str) -> None:
    """Raise InputError that names the first part which is not the family's: others were never compared with it."""
    if isinstance(found, dict):
        for name, part in found.items():
            _check_parts(part, expected[name], f"{where}.{name}", architecture)
    elif found != expected:
        raise InputError(f"{where} is {describe(found)}, expected {describe(expected)} for {architecture}")


def _rope_scaling(scaling: RotaryScaling) -> dict[str, Any]:
    """Return the field in Hugging Face's spelling, which TensorRT-LLM keeps."""
    if isinstance(scaling, Yarn):
        found = {name: value for name, value in asdict(scaling).items() if name != "kind"}
        return {"rope_type": "yarn", **found}
    if isinstance(scaling, LongRope):
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "attention_factor": scaling.attention_factor,
        }
    if scaling.kind != "llama3":
        return {"rope_type": scaling.kind, "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
