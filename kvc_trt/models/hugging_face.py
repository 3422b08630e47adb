"""Hugging Face `config.json` -> `ModelConfig`, for the architectures that the graphs can express.

Both spellings of the rotary settings are read: `rope_theta` + `rope_scaling {type | rope_type}` and the newer
`rope_parameters {rope_theta, rope_type, ...}`. Whatever would change the numbers and is not understood is refused.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig, RopeScaling
from kvc_trt.models.containment import contained
from kvc_trt.models.fields import Fields, describe
from kvc_trt.models.fp8 import check_quantisation

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3")
_DTYPES = ("float32", "float16", "bfloat16")
_MAX_CONFIG_BYTES = 1 << 20
_MAX_LENGTH = 1 << 26
_MAX_EOS_IDS = 64


def read_config(directory: str | Path) -> ModelConfig:
    """Parse DIRECTORY/config.json; end-of-sequence ids of generation_config.json are added to its own."""
    directory = Path(directory)
    generation = directory / "generation_config.json"
    for path in (directory / "config.json", generation):
        if path.is_symlink():
            contained(directory, path.name)
    config = dict(read_json_object(directory / "config.json"))
    if generation.is_file():
        extra = read_json_object(generation).get("eos_token_id")
        ids = (_as_list(config.get("eos_token_id")) + _as_list(extra))[: _MAX_EOS_IDS + 1]
        config["eos_token_id"] = [token for position, token in enumerate(ids) if token not in ids[:position]]
    return parse_config(config, str(directory / "config.json"))


def read_json_object(path: Path) -> Mapping[str, Any]:
    """A JSON object from a small file; anything else is an `InputError`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file")
        if status.st_size > _MAX_CONFIG_BYTES:
            raise InputError(f"{path}: {status.st_size} bytes, expected at most {_MAX_CONFIG_BYTES}")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({describe(str(error))})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {describe(value)}")
    return value


def parse_config(mapping: Mapping[str, Any], source: str, *, messages: Mapping[str, str] | None = None) -> ModelConfig:
    """Validate every field; `source` (a path or preset name) opens each error message.

    `messages` renames fields in error messages, for a mapping that was translated from other names.
    """
    fields = Fields(mapping, source, messages)
    architecture = _architecture(fields)
    _refuse_what_changes_numbers(fields)
    heads = fields.integer("num_attention_heads", 1, 1024)
    kv_heads = fields.integer("num_key_value_heads", 1, 1024, default=heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    hidden = fields.integer("hidden_size", 1, 1 << 18)
    has_bias_switch = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = has_bias_switch and fields.boolean("attention_bias", False)
    base, scaling = _rotary(fields)
    vocab_size = fields.integer("vocab_size", 1, 1 << 23)
    return ModelConfig(
        architecture=architecture,
        dtype=fields.text("dtype", _DTYPES, default=fields.text("torch_dtype", _DTYPES, default="float32")),
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 20),
        num_hidden_layers=fields.integer("num_hidden_layers", 1, 1024),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=_head_size(fields, hidden, heads),
        norm_epsilon=fields.number("rms_norm_eps", 1e-12, 0.1),
        rotary_base=base,
        rotary_scaling=scaling,
        max_position_embeddings=_longest_sequence(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(fields, architecture),
        bos_token_id=_bos(fields, vocab_size),
        eos_token_ids=_eos(fields, vocab_size),
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _architecture(fields: Fields) -> str:
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise fields.fail("architectures", f"one of {', '.join(ARCHITECTURES)}", names)
    return str(names[0])


def _refuse_what_changes_numbers(fields: Fields) -> None:
    fields.text("hidden_act", ("silu",), default="silu")
    if fields.boolean("mlp_bias", False):
        raise fields.fail("mlp_bias", "false (biases in the feed-forward layers are not supported)", True)
    if fields.number("partial_rotary_factor", 0, 1, default=1.0) != 1.0:
        raise fields.fail("partial_rotary_factor", "1 (all channels rotate)", fields.raw("partial_rotary_factor"))
    check_quantisation(fields)


def _head_size(fields: Fields, hidden: int, heads: int) -> int:
    size = fields.raw("head_dim", None)
    if size is None:
        if hidden % heads:
            raise fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads})", hidden)
        size = hidden // heads
    if type(size) is not int or not 2 <= size <= 1024 or size % 2:
        raise fields.fail("head_dim", "an even integer in 2..1024", size)
    return size


def _longest_sequence(fields: Fields) -> int:
    """Positions the model was made for. Vicuna and LongChat name the stretched length `max_sequence_length`."""
    length = fields.integer("max_position_embeddings", 1, _MAX_LENGTH)
    return max(length, fields.integer("max_sequence_length", 1, _MAX_LENGTH, default=length))


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    if architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        # An absent field means 4096 to Mistral; only an explicit null switches the window off.
        absent = "sliding_window" not in fields.mapping
        return 4096 if absent else _optional_window(fields)
    return _optional_window(fields) if fields.boolean("use_sliding_window", False) else None


def _optional_window(fields: Fields) -> int | None:
    if fields.raw("sliding_window", None) is None:
        return None
    return fields.integer("sliding_window", 1, _MAX_LENGTH)


def _rotary(fields: Fields) -> tuple[float, RopeScaling | None]:
    parameters = fields.raw("rope_parameters", None)
    settings = fields.raw("rope_scaling", None) if parameters is None else parameters
    base = fields.number("rope_theta", 1.0, 1e12, default=10000.0)
    if settings is None:
        return base, None
    scaling = Fields(settings, f"{fields.source}: rope_{'scaling' if parameters is None else 'parameters'}")
    if parameters is not None:
        base = scaling.number("rope_theta", 1.0, 1e12, default=base)
    kind = scaling.text("rope_type", ROPE_KINDS, default=scaling.text("type", ROPE_KINDS, default="default"))
    if scaling.number("partial_rotary_factor", 0, 1, default=1.0) != 1.0:
        raise scaling.fail("partial_rotary_factor", "1 (all channels rotate)", scaling.raw("partial_rotary_factor"))
    if kind == "default":
        return base, None
    factor = scaling.number("factor", 1.0, 1024.0)
    return base, RopeScaling("linear", factor) if kind == "linear" else _llama3(scaling, factor)


def _llama3(scaling: Fields, factor: float) -> RopeScaling:
    low = scaling.number("low_freq_factor", 1e-3, 1e3)
    high = scaling.number("high_freq_factor", 1e-3, 1e3)
    if high <= low:
        raise scaling.fail("high_freq_factor", f"more than low_freq_factor ({low:g})", high)
    original = scaling.integer("original_max_position_embeddings", 1, _MAX_LENGTH)
    return RopeScaling("llama3", factor, low, high, original)


def _bos(fields: Fields, vocab_size: int) -> int | None:
    if fields.raw("bos_token_id", None) is None:
        return None
    return fields.integer("bos_token_id", 0, vocab_size - 1)


def _eos(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    value = fields.raw("eos_token_id", None)
    ids = _as_list(value)
    if len(ids) > _MAX_EOS_IDS or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
        raise fields.fail("eos_token_id", f"token ids below vocab_size ({vocab_size})", value)
    return tuple(ids)
