"""Hugging Face `config.json` -> `ModelConfig`, for the families whose parts are known (`kvc_trt.models.family`).

A field that would change the numbers and is not understood is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_json_input
from kvc_trt.models.config import LongRope, ModelConfig, ModelDescription
from kvc_trt.models.family import ACTIVATIONS, UNDECLARED, Family, families
from kvc_trt.models.fields.rotary import rotary_settings, stretched_length
from kvc_trt.models.sources.containment import contained
from kvc_trt.models.sources.fp8 import check_quantisation
from kvc_trt.models.sources.fused_experts import is_mxfp4
from kvc_trt.models.sources.int4 import int4_layout
from kvc_trt.models.sources.text_part import text_fields
from kvc_trt.validation import ForeignSchema, validated

LARGEST_CONFIG = 1 << 20
"""Bytes of config.json or generation_config.json."""
_MAX_EOS_IDS = 64
_SUFFIX = "ForCausalLM"


class _Architecture(ForeignSchema):
    architectures: list[str]


def read_config(directory: str | Path) -> ModelConfig:
    """Read DIRECTORY/config.json, and further end-of-sequence ids from generation_config.json."""
    directory = Path(directory)
    generation = directory / "generation_config.json"
    for path in (directory / "config.json", generation):
        if os.path.islink(path):
            contained(directory, path.name)
    config = dict(read_decoder_fields(directory / "config.json")[0])
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


def read_decoder_fields(path: Path) -> tuple[Mapping[str, Any], bool]:
    """Return the decoder's fields of a config.json, and whether it stands beside a part that reads images."""
    fields = read_json_object(path)
    text = text_fields(fields, str(path))
    return (fields, False) if text is None else (text, True)


def parse_config(mapping: Mapping[str, Any], source: str, *, spelling: Mapping[str, str] | None = None) -> ModelConfig:
    """Validate every field; `source` (a path or preset name) opens each error message.

    `spelling` renames fields in error messages, for a mapping that was translated from other names.
    """
    family = _family_of(mapping, source, spelling or {})
    given = {ours: mapping[theirs] for ours, theirs in family.spelling.items() if theirs in mapping}
    given |= {name: value for name, value in mapping.items() if name not in family.spelling}
    names = {**family.spelling, **(spelling or {})}
    fields = validated(family.fields, given, source, spelling=names)

    def wrong(name: str, expected: str, found: object = None) -> InputError:
        found = describe(getattr(fields, name) if found is None else found)
        return InputError(f"{source}: {names.get(name, name)} is {found}, expected {expected}")

    _check_undeclared(given, family, source)
    hidden, heads = fields.hidden_size, fields.num_attention_heads
    kv_heads = fields.num_key_value_heads
    if kv_heads is None:
        kv_heads = heads if "num_key_value_heads" in given else (family.absent_kv_heads or heads)
    if heads % kv_heads:
        raise wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    head_size = fields.head_dim
    if head_size is None and "head_dim" not in given:
        head_size = family.absent_head_size
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
        where = f"{source}: quantization_config"
        if is_mxfp4(fields.quantization_config):
            if not family.mxfp4:
                raise InputError(f"{where}: quant_method is 'mxfp4', expected another for {fields.architectures[0]}")
        elif int4_layout(fields.quantization_config, where) is None:
            check_quantisation(fields.quantization_config, where)
    base, scaling, fraction = rotary_settings(fields, source)
    try:
        own = dict(family.describe(fields, given))
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None
    own["description"] = _with_rotary_channels(
        own.get("description", ModelDescription()), family, fraction, head_size, wrong
    )
    channels = own["description"].rotary_channels or head_size
    if isinstance(scaling, LongRope):
        for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
            if len(factors) != channels // 2:
                raise InputError(f"{source}: {name} has {len(factors)} numbers, expected {channels // 2}")
    computed = own["description"].feed_forward.activation
    if ACTIVATIONS[fields.hidden_act] != computed:
        raise wrong("hidden_act", f"{computed}: nothing else is computed")
    longest = stretched_length(fields.max_position_embeddings, scaling)
    defaults: dict[str, Any] = {"num_key_value_heads": kv_heads}
    defaults |= {"qkv_bias": False, "output_bias": False, "qk_norm": False, "sliding_window": None}
    return ModelConfig(
        architecture=fields.architectures[0],
        dtype=fields.dtype or fields.torch_dtype or "float32",
        vocab_size=fields.vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.intermediate_size,
        num_hidden_layers=fields.num_hidden_layers,
        num_attention_heads=heads,
        head_size=head_size,
        norm_epsilon=fields.rms_norm_eps,
        rotary_base=base,
        rotary_scaling=scaling,
        max_position_embeddings=max(longest, fields.max_sequence_length),
        tie_word_embeddings=fields.tie_word_embeddings,
        bos_token_id=fields.bos_token_id,
        eos_token_ids=tuple(eos),
        **{**defaults, **own},
    )


def _family_of(mapping: Mapping[str, Any], source: str, spelling: Mapping[str, str]) -> Family:
    """Return the family of the one architecture that the mapping names."""
    found, known = validated(_Architecture, mapping, source, spelling=spelling).architectures, families()
    if len(found) != 1 or found[0] not in known:
        name = spelling.get("architectures", "architectures")
        text = mapping.get("text_config")
        rank = mapping.get("kv_lora_rank", text.get("kv_lora_rank") if isinstance(text, dict) else None)
        if rank is not None:
            raise InputError(
                f"{source}: {name} is {describe(found)} with kv_lora_rank {describe(rank)}, "
                "expected keys and values by head: multi-head latent attention (MLA) caches one latent vector of all "
                "heads, and policies choose by the keys of each"
            )
        if len(found) == 1 and found[0].startswith("Gemma4"):
            raise InputError(
                f"{source}: {name} is {describe(found)}, expected layers whose heads are alike: those of Gemma 4 "
                "differ in size and number, and some layers reuse keys and values of others"
            )
        classes = ", ".join(one.removesuffix(_SUFFIX) for one in known)
        beside_images = ", ".join(own.beside_images.name for own in known.values() if own.beside_images is not None)
        raise InputError(
            f"{source}: {name} is {describe(found)}, expected one of {len(known)} classes",
            hint=f"{_SUFFIX} behind one of {classes}; or {beside_images}",
        )
    return known[found[0]]


def _check_undeclared(given: Mapping[str, Any], family: Family, source: str) -> None:
    """Refuse a field of `UNDECLARED` that the family does not read, unless it has no effect."""
    for name, neutral in UNDECLARED.items():
        found = given.get(name, neutral)
        if name == "layer_types" and isinstance(found, list):
            found = next((kind for kind in found if kind != "full_attention"), neutral)
        if name not in family.fields.model_fields and found != neutral:
            shown, expected = (_in_json(value) for value in (found, neutral))
            raise InputError(f"{source}: {name} is {shown}, expected {expected} for {family.architecture}")


def _in_json(value: Any) -> str:
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else describe(value)


def _with_rotary_channels(
    description: ModelDescription,
    family: Family,
    fraction: float | None,
    head_size: int,
    wrong: Callable[..., InputError],
) -> ModelDescription:
    """Return the description with the channels that rotate, a share of the head's."""
    fraction = family.rotary_fraction if fraction is None else fraction
    if fraction in (None, 1.0):
        return description
    name = "partial_rotary_factor"
    if family.rotary_fraction is None:
        raise wrong(name, "1: all channels of a head rotate", fraction)
    channels = int(head_size * fraction)
    if not 2 <= channels <= head_size or channels % 2 or (head_size - channels) % 2:
        raise wrong(name, f"a share of {head_size} channels that is an even number of them", fraction)
    return replace(description, rotary_channels=channels)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
