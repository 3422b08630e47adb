"""Hugging Face `config.json` -> `ModelConfig`, for the architectures that the graphs can express.

Both spellings of the rotary settings are read: `rope_theta` + `rope_scaling {type | rope_type}` and the newer
`rope_parameters {rope_theta, rope_type, ...}`. Whatever would change the numbers and is not understood is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_json_input
from kvc_trt.models.config import ModelConfig, RopeScaling
from kvc_trt.models.sources.containment import contained
from kvc_trt.models.sources.fp8 import check_quantisation
from kvc_trt.validation import ForeignSchema, validated

_Architecture = Literal["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
_DType = Literal["float32", "float16", "bfloat16"]
_RopeKind = Literal["default", "linear", "llama3"]
LARGEST_CONFIG = 1 << 20
"""Bytes of config.json or generation_config.json."""
_MAX_LENGTH = 1 << 26
_MAX_EOS_IDS = 64
_Length = Annotated[int, Field(ge=1, le=_MAX_LENGTH)]
_Base = Annotated[float, Field(ge=1, le=1e12)]
_AllChannels = Annotated[float, Field(ge=1, le=1)]
"""The share of a head's channels that rotate: graphs rotate all of them."""
_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
"""What an absent `num_key_value_heads` means to transformers; with null, and to Llama, as many as there are heads."""
_HEAD_SIZES = {"Qwen3ForCausalLM": 128}
"""What an absent `head_dim` means to it; elsewhere, and with null, the hidden size divided among the heads."""
_Blend = Annotated[float, Field(ge=1e-3, le=1e3)]


class _Config(ForeignSchema):
    """The fields that graphs depend on; a value that no graph can express is refused, never ignored."""

    architectures: Annotated[list[_Architecture], Field(min_length=1, max_length=1)]
    vocab_size: Annotated[int, Field(ge=1, le=1 << 23)]
    hidden_size: Annotated[int, Field(ge=1, le=1 << 18)]
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 20)]
    num_hidden_layers: Annotated[int, Field(ge=1, le=1024)]
    num_attention_heads: Annotated[int, Field(ge=1, le=1024)]
    num_key_value_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    head_dim: int | None = None
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)]
    max_position_embeddings: _Length
    max_sequence_length: _Length = 1
    """The stretched length of Vicuna and LongChat."""
    dtype: _DType | None = None
    torch_dtype: _DType | None = None
    rope_theta: _Base = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: _AllChannels = 1.0
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: Literal[False] = False
    tie_word_embeddings: bool = False
    sliding_window: Any = None
    use_sliding_window: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: Any = None


class _Rope(ForeignSchema):
    """`rope_scaling` or `rope_parameters`; old files say `type` for `rope_type`."""

    rope_theta: _Base | None = None
    rope_type: _RopeKind | None = None
    type: _RopeKind | None = None
    partial_rotary_factor: _AllChannels = 1.0


class _Linear(ForeignSchema):
    factor: Annotated[float, Field(ge=1, le=1024)]


class _Llama3(_Linear):
    low_freq_factor: _Blend
    high_freq_factor: _Blend
    original_max_position_embeddings: _Length


class _SlidingWindow(ForeignSchema):
    sliding_window: _Length


def read_config(directory: str | Path) -> ModelConfig:
    """Read DIRECTORY/config.json, and further end-of-sequence ids from generation_config.json."""
    directory = Path(directory)
    generation = directory / "generation_config.json"
    for path in (directory / "config.json", generation):
        if os.path.islink(path):
            contained(directory, path.name)
    config = dict(read_json_object(directory / "config.json"))
    if os.path.isfile(generation):
        extra = read_json_object(generation).get("eos_token_id")
        ids = (_as_list(config.get("eos_token_id")) + _as_list(extra))[: _MAX_EOS_IDS + 1]
        config["eos_token_id"] = [token for position, token in enumerate(ids) if token not in ids[:position]]
    return parse_config(config, str(directory / "config.json"))


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Read a small file that holds one JSON object; anything else is an `InputError`."""
    value = read_json_input(path, LARGEST_CONFIG)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {describe(value)}")
    return value


def parse_config(mapping: Mapping[str, Any], source: str, *, spelling: Mapping[str, str] | None = None) -> ModelConfig:
    """Validate every field; `source` (a path or preset name) opens each error message.

    `spelling` renames fields in error messages, for a mapping that was translated from other names.
    """
    fields = validated(_Config, mapping, source, spelling=spelling)

    def wrong(name: str, expected: str, found: object = None) -> InputError:
        found = describe(getattr(fields, name) if found is None else found)
        return InputError(f"{source}: {(spelling or {}).get(name, name)} is {found}, expected {expected}")

    architecture, hidden, heads = fields.architectures[0], fields.hidden_size, fields.num_attention_heads
    absent_kv_heads = heads if "num_key_value_heads" in mapping else _KV_HEADS.get(architecture, heads)
    kv_heads = absent_kv_heads if fields.num_key_value_heads is None else fields.num_key_value_heads
    if heads % kv_heads:
        raise wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    head_size = fields.head_dim
    if head_size is None and "head_dim" not in mapping:
        head_size = _HEAD_SIZES.get(architecture)
    if head_size is None and hidden % heads:
        raise wrong("hidden_size", f"a multiple of num_attention_heads ({heads})")
    head_size = hidden // heads if head_size is None else head_size
    if not 2 <= head_size <= 1024 or head_size % 2:
        raise wrong("head_dim", "an even integer in 2..1024", head_size)
    eos = _as_list(fields.eos_token_id)
    if len(eos) > _MAX_EOS_IDS or not all(0 <= token < fields.vocab_size for token in eos):
        raise wrong("eos_token_id", f"token ids below vocab_size ({fields.vocab_size})")
    if fields.bos_token_id is not None and not 0 <= fields.bos_token_id < fields.vocab_size:
        raise wrong("bos_token_id", f"a token id below vocab_size ({fields.vocab_size})")
    if fields.quantization_config is not None:
        check_quantisation(fields.quantization_config, f"{source}: quantization_config")
    base, scaling = _rotary(fields, source)
    biased = fields.attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return ModelConfig(
        architecture=architecture,
        dtype=fields.dtype or fields.torch_dtype or "float32",
        vocab_size=fields.vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.intermediate_size,
        num_hidden_layers=fields.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=head_size,
        norm_epsilon=fields.rms_norm_eps,
        rotary_base=base,
        rotary_scaling=scaling,
        max_position_embeddings=max(fields.max_position_embeddings, fields.max_sequence_length),
        tie_word_embeddings=fields.tie_word_embeddings,
        qkv_bias=biased or architecture == "Qwen2ForCausalLM",
        output_bias=biased,
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(mapping, fields, source),
        bos_token_id=fields.bos_token_id,
        eos_token_ids=tuple(eos),
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _rotary(fields: _Config, source: str) -> tuple[float, RopeScaling | None]:
    name = "rope_scaling" if fields.rope_parameters is None else "rope_parameters"
    settings, where = getattr(fields, name), f"{source}: {name}"
    if settings is None:
        return fields.rope_theta, None
    rope = validated(_Rope, settings, where)
    base = rope.rope_theta if name == "rope_parameters" and rope.rope_theta is not None else fields.rope_theta
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling("linear", validated(_Linear, settings, where).factor)
    scaling = validated(_Llama3, settings, where)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        raise InputError(f"{where}: high_freq_factor is {high:g}, expected more than low_freq_factor ({low:g})")
    return base, RopeScaling("llama3", scaling.factor, low, high, scaling.original_max_position_embeddings)


def _sliding_window(mapping: Mapping[str, Any], fields: _Config, source: str) -> int | None:
    """How many tokens attention sees, None for all; ignored for architectures without a sliding window."""
    architecture = fields.architectures[0]
    if architecture == "LlamaForCausalLM" or (architecture != "MistralForCausalLM" and not fields.use_sliding_window):
        return None
    if architecture == "MistralForCausalLM" and "sliding_window" not in mapping:
        return 4096  # an absent field means this to Mistral; only an explicit null switches the window off
    if fields.sliding_window is None:
        return None
    return validated(_SlidingWindow, mapping, source).sliding_window
