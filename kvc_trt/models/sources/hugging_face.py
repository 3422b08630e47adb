"""Hugging Face `config.json` -> `ModelConfig`, for the families whose parts are known (`kvc_trt.models.family`).

A field that would change the numbers and is not understood is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_json_input
from kvc_trt.models.config import LongRope, ModelConfig, ModelDescription, RotaryScaling
from kvc_trt.models.family import (
    ACTIVATIONS,
    REFUSED,
    SUFFIX,
    UNDECLARED,
    WHY_NOT,
    DecoderFields,
    Family,
    families,
    family_of_own_file,
)
from kvc_trt.models.fields.rotary import rotary_settings, stretched_length
from kvc_trt.models.sources.containment import contained
from kvc_trt.models.sources.fp8 import check_quantisation
from kvc_trt.models.sources.fused_experts import is_mxfp4
from kvc_trt.models.sources.int4 import int4_layout
from kvc_trt.models.sources.text_part import text_fields
from kvc_trt.validation import ForeignSchema, validated

LARGEST_CONFIG = 1 << 20
"""Bytes of config.json or generation_config.json."""
_CHECKPOINTS = "--model NAME (kvc-trt models), a directory with config.json and safetensors, or a file .gguf"
_MAX_EOS_IDS = 64


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


def read_json_object(path: Path, *, hint: str | None = None) -> Mapping[str, Any]:
    """Read a small file that holds one JSON object; InputError for anything else, with `hint` if it is not there."""
    value = read_json_input(path, LARGEST_CONFIG, hint=hint)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {describe(value)}")
    return value


def read_decoder_fields(path: Path) -> tuple[Mapping[str, Any], bool]:
    """Return the decoder's fields of a config.json, and whether it stands beside a part that reads images."""
    fields = read_json_object(path, hint=_CHECKPOINTS)
    text = text_fields(fields, str(path))
    return (fields, False) if text is None else (text, True)


def states_dtype(fields: Mapping[str, Any]) -> bool:
    """Return whether a decoder's fields say the type of its weights."""
    return any(fields.get(name) is not None for name in ("dtype", "torch_dtype"))


def parse_config(mapping: Mapping[str, Any], source: str, *, spelling: Mapping[str, str] | None = None) -> ModelConfig:
    """Validate every field; `source` (a path or preset name) opens each error message.

    `spelling` renames fields in error messages, for a mapping that was translated from other names.
    """
    family = _family_of(mapping, source, spelling or {})
    given = {ours: mapping[theirs] for ours, theirs in family.spelling.items() if theirs in mapping}
    given |= {name: value for name, value in mapping.items() if name not in family.spelling}
    names = {**family.spelling, **(spelling or {})}
    fields = validated(family.fields, given, source, spelling=names)
    _check_undeclared(given, family, source)
    read = _Reading(family, fields, given, source, names)
    kv_heads, head_size, eos = read.kv_heads(), read.head_size(), read.end_tokens()
    read.check_quantisation()
    base, scaling, fraction = rotary_settings(fields, source)
    own = read.own_parts(fraction, head_size, scaling)
    longest = stretched_length(fields.max_position_embeddings, scaling)
    defaults: dict[str, Any] = {"num_key_value_heads": kv_heads}
    defaults |= {"qkv_bias": False, "output_bias": False, "qk_norm": False, "sliding_window": None}
    return ModelConfig(
        architecture=fields.architectures[0],
        dtype=fields.dtype or fields.torch_dtype or family.absent_dtype,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_hidden_layers=fields.num_hidden_layers,
        num_attention_heads=fields.num_attention_heads,
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


@dataclass(frozen=True)
class _Reading:
    """A config.json whose fields have their types, and what follows from several of them."""

    family: Family
    fields: DecoderFields
    given: Mapping[str, Any]
    """The fields that the file has, by the names of `fields`."""
    source: str
    names: Mapping[str, str]
    """Name of a field -> its name in messages, if they differ."""

    def wrong(self, name: str, expected: str, found: object = None) -> InputError:
        """Return the error for a field's value, or for `found` in its place."""
        found = describe(getattr(self.fields, name) if found is None else found)
        return InputError(f"{self.source}: {self.names.get(name, name)} is {found}, expected {expected}")

    def kv_heads(self) -> int:
        """Return the number of KV heads; where the file has none, null means as many as query heads."""
        heads, found = self.fields.num_attention_heads, self.fields.num_key_value_heads
        if found is None:
            found = heads if "num_key_value_heads" in self.given else (self.family.absent_kv_heads or heads)
        if heads % found:
            raise self.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", found)
        return found

    def head_size(self) -> int:
        """Return the channels of a head: without a field or a family's own number, an equal part of the hidden ones."""
        hidden, heads, found = self.fields.hidden_size, self.fields.num_attention_heads, self.fields.head_dim
        if found is None and "head_dim" not in self.given:
            found = self.family.absent_head_size
        if found is None and hidden % heads:
            raise self.wrong("hidden_size", f"a multiple of num_attention_heads ({heads})")
        found = hidden // heads if found is None else found
        if not 2 <= found <= 1024 or found % 2:
            raise self.wrong("head_dim", "an even integer in 2..1024", found)
        return found

    def end_tokens(self) -> list[int]:
        """Return the tokens that end an answer; they and the first token of a prompt must be in the vocabulary."""
        size, first = self.fields.vocab_size, self.fields.bos_token_id
        found = _as_list(self.fields.eos_token_id)
        if len(found) > _MAX_EOS_IDS or not all(0 <= token < size for token in found):
            raise self.wrong("eos_token_id", f"token ids below vocab_size ({size})")
        if first is not None and not 0 <= first < size:
            raise self.wrong("bos_token_id", f"a token id below vocab_size ({size})")
        return found

    def check_quantisation(self) -> None:
        """Refuse a quantisation that no reader of weights takes."""
        settings, where = self.fields.quantization_config, f"{self.source}: quantization_config"
        if settings is None:
            return
        if is_mxfp4(settings):
            if not self.family.mxfp4:
                expected = f"expected another for {self.fields.architectures[0]}"
                raise InputError(f"{where}: quant_method is 'mxfp4', {expected}")
        elif int4_layout(settings, where) is None:
            check_quantisation(settings, where)

    def own_parts(self, fraction: float | None, head_size: int, scaling: RotaryScaling | None) -> dict[str, Any]:
        """Return the fields of a `ModelConfig` that the family describes, with the channels of a head that rotate."""
        try:
            own = dict(self.family.describe(self.fields, self.given))
        except ValueError as error:
            raise InputError(f"{self.source}: {error}") from None
        description = self._with_rotary_channels(own.get("description", ModelDescription()), fraction, head_size)
        channels = description.rotary_channels or head_size
        if isinstance(scaling, LongRope):
            for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
                if len(factors) != channels // 2:
                    raise InputError(f"{self.source}: {name} has {len(factors)} numbers, expected {channels // 2}")
        computed = description.feed_forward.activation
        if ACTIVATIONS[self.fields.hidden_act] != computed:
            raise self.wrong("hidden_act", f"{computed}: nothing else is computed")
        return {**own, "description": description}

    def _with_rotary_channels(
        self, description: ModelDescription, fraction: float | None, head_size: int
    ) -> ModelDescription:
        """Return the description with the channels that rotate, a share of the head's."""
        usual = self.family.rotary_fraction
        fraction = usual if fraction is None else fraction
        if fraction in (None, 1.0):
            return description
        name = "partial_rotary_factor"
        if usual is None:
            raise self.wrong(name, "1: all channels of a head rotate", fraction)
        channels = int(head_size * fraction)
        if not 2 <= channels <= head_size or channels % 2 or (head_size - channels) % 2:
            raise self.wrong(name, f"a share of {head_size} channels that is an even number of them", fraction)
        return replace(description, rotary_channels=channels)


def _family_of(mapping: Mapping[str, Any], source: str, spelling: Mapping[str, str]) -> Family:
    """Return the family of the one architecture that the mapping names."""
    found = validated(_Architecture, mapping, source, spelling=spelling).architectures
    if len(found) == 1 and (own := family_of_own_file(found[0])) is not None:
        return own
    known = families()
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
        for beginning, refusal in REFUSED.items():
            if len(found) == 1 and found[0].startswith(beginning):
                raise InputError(f"{source}: {name} is {describe(found)}, expected {refusal.expected}: {refusal.why}")
        classes = ", ".join(one.removesuffix(SUFFIX) for one in known)
        beside_images = ", ".join(own.beside_images.name for own in known.values() if own.beside_images is not None)
        raise InputError(
            f"{source}: {name} is {describe(found)}, expected one of {len(known)} classes",
            hint=f"{SUFFIX} behind one of {classes}; or {beside_images}",
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
            why = f": {WHY_NOT[name]}" if name in WHY_NOT else ""
            raise InputError(f"{source}: {name} is {shown}, expected {expected} for {family.architecture}{why}")


def _in_json(value: Any) -> str:
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else describe(value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
