"""A GGUF file's metadata -> `ModelConfig`, for the architectures that the graphs can express.

The keys are translated to the fields of config.json and validated as those are; errors name the file's own keys.
A key that would change the numbers and is not understood is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import Family, families
from kvc_trt.models.gguf.header import GgufHeader, GgufTensor, Scalar
from kvc_trt.models.gguf.keys import EPSILON, EXPERTS, LATER_TOKENS, SHARPNESS, WINDOW, GgufKeys
from kvc_trt.models.gguf.names import EMBEDDING, HEAD, ROPE_FACTORS
from kvc_trt.models.gguf.rope_factors import check_shape, llama3_scaling
from kvc_trt.models.sources.hugging_face import parse_config

_LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"
"""The key of models whose norms are LayerNorm."""
_ROTARY_CHANNELS = "rope.dimension_count"
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": EPSILON,
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
_ABSENT_BASE = 10000.0
"""The rotary base of a file that states none."""
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""The end of a text, of a turn and of a message; a model may stop at any of them."""
_NEUTRAL: Mapping[str, tuple[Scalar, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0,),
    EXPERTS: (0,),
    "expert_gating_func": (1, 0),  # the softmax, or the architecture's own
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0,),
    LATER_TOKENS: (0,),
    "residual_scale": (0.0,),
    "rope.scaling.alpha": (0.0,),
    SHARPNESS: (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that change a model's results, and the values with which they do not: the only ones that graphs compute, unless
a family reads the key (`GgufArchitecture.reads`)."""
_YARN = {
    "original_max_position_embeddings": "original_context_length", "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
}  # fmt: skip
"""Field of YaRN's settings -> key under `rope.scaling`; an absent key has the default of config.json."""
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


def model_config(header: GgufHeader, read: Callable[[GgufTensor], NDArray[Any]]) -> ModelConfig:
    """The model that the file describes; `read` is asked for its tables of rotary factors alone, whose shape is known.

    Raises InputError for a model that no graph computes.
    """
    name = header.scalar("general.architecture")
    if name not in architectures():
        known = ", ".join(architectures())
        raise InputError(f"{header.source}: general.architecture is {describe(name)}, expected one of {known}")
    keys = GgufKeys(header, str(name), read)
    family = _family_of(keys)
    assert family.gguf is not None
    _check_neutral(keys, family.gguf.reads.union(family.gguf.keys.values()))
    own = dict(_FIELDS)
    if keys[_LAYER_NORM_EPSILON] is not None:
        own["rms_norm_eps"] = _LAYER_NORM_EPSILON
    fields: dict[str, Any] = {field: keys[key] for field, key in own.items()}
    fields |= {
        "architectures": [family.architecture],
        "vocab_size": _vocabulary_size(keys),
        "tie_word_embeddings": HEAD not in header.tensors,
        "attention_bias": any(keys.has(f"blk.0.{part}.bias") for part in ("attn_q", "attn_qkv")),
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "use_bias": "blk.0.ffn_up.bias" in header.tensors,
        "dtype": _DTYPES.get(header.tensors[EMBEDDING].type, "float32"),
        "bos_token_id": header.scalar("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(header, _vocabulary_size(keys)) or None,
        "rope_scaling": _scaling(keys, family.gguf.yarn(keys)),
        **_head_size(keys, family),
    }
    if fields["rope_theta"] is None:
        fields["rope_theta"] = _ABSENT_BASE
    fields |= {field: keys[key] for field, key in family.gguf.keys.items() if keys[key] is not None}
    fields |= family.gguf.fields(keys)
    spelling = {field: keys.spelled(key) for field, key in (own | dict(family.gguf.keys)).items()}
    spelling |= {f"{kind}_token_id": f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos")}
    spelling |= {
        "head_dim": keys.spelled("attention.key_length"), "rope_scaling": keys.spelled("rope.scaling"),
        "partial_rotary_factor": keys.spelled(_ROTARY_CHANNELS),
    }  # fmt: skip
    fields = {family.spelling.get(field, field): value for field, value in fields.items() if value is not None}
    config = parse_config(fields, header.source, spelling=spelling)
    factors = header.tensors.get(ROPE_FACTORS)
    if factors is None:
        return config
    where = f"{header.source}: tensor {ROPE_FACTORS}"
    if config.rotary_scaling is not None:
        raise InputError(f"{where} beside {keys.spelled('rope.scaling')}: expected one of them")
    check_shape(factors.shape, config.head_size, where)
    fields["rope_scaling"] = llama3_scaling(read(factors), config.rotary_base, config.head_size, where)
    return parse_config(fields, header.source, spelling=spelling)


@cache
def architectures() -> Mapping[str, tuple[Family, ...]]:
    """Return `general.architecture` -> the families that its files hold; those of Mistral usually say llama."""
    found: dict[str, tuple[Family, ...]] = {}
    for one in families().values():
        for name in one.gguf.names if one.gguf is not None else ():
            found[name] = (*found.get(name, ()), one)
    return dict(sorted(found.items()))


def _family_of(keys: GgufKeys) -> Family:
    for one in architectures()[keys.architecture]:
        if one.gguf is not None and one.gguf.when(keys):
            return one
    raise InputError(f"{keys.header.source}: no family of {keys.architecture} has these keys")


def end_tokens(header: GgufHeader, vocab_size: int) -> list[int]:
    """The ids at which the model stops, without repetition; InputError for one that is not a token of the model."""
    ids: list[int] = []
    for key in (f"tokenizer.ggml.{name}" for name in _END_TOKENS):
        token = header.scalar(key)
        if token is None or token in ids:
            continue
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InputError(f"{header.source}: {key} is {describe(token)}, expected a token id below {vocab_size}")
        ids.append(token)
    return ids


def _check_neutral(keys: GgufKeys, understood: frozenset[str]) -> None:
    for key, neutral in _NEUTRAL.items():
        if key not in understood and keys[key] not in (None, *neutral):
            raise keys.wrong(key, f"{neutral[0]}: nothing else is computed")
    if WINDOW not in understood and keys[WINDOW] not in (None, 0):
        raise keys.wrong(WINDOW, f"0: {keys.architecture} has no sliding window")


def _vocabulary_size(keys: GgufKeys) -> int:
    """The rows of the embedding; the metadata may repeat them, but not contradict them."""
    embedding = keys.header.tensors.get(EMBEDDING)
    if embedding is None:
        raise InputError(f"{keys.header.source}: tensor {EMBEDDING} is missing")
    rows = embedding.shape[0]
    if keys["vocab_size"] not in (None, rows):
        raise keys.wrong("vocab_size", f"{rows}, the rows of {EMBEDDING}")
    return rows


def _head_size(keys: GgufKeys, family: Family) -> dict[str, Any]:
    """Return `head_dim`, and the share of its channels that rotate where the family may leave some out.

    Without `attention.key_length` a head whose channels all rotate is as wide as they are; values must be as wide.
    """
    size, channels = keys["attention.key_length"], keys[_ROTARY_CHANNELS]
    partial = family.rotary_fraction is not None
    if size is None and not partial:
        size = channels
    compared = ("attention.value_length",) if partial else ("attention.value_length", _ROTARY_CHANNELS)
    for key in compared:
        if size is not None and keys[key] not in (None, size):
            raise keys.wrong(key, f"{describe(size)}, the width of a head's keys")
    if not partial:
        return {"head_dim": size}
    if size is None:
        hidden, heads = keys["embedding_length"], keys["attention.head_count"]
        size = hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None
    if channels is None or size is None or channels == size:
        return {"head_dim": size, "partial_rotary_factor": 1.0}
    if type(channels) is not int or type(size) is not int or not 0 < channels < size:
        raise keys.wrong(_ROTARY_CHANNELS, f"at most {describe(size)}, the channels of a head")
    # The next number above the share: their product must not fall below the channels.
    return {"head_dim": size, "partial_rotary_factor": math.nextafter(channels / size, 1)}


def _scaling(keys: GgufKeys, yarn: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope.scaling` as llama.cpp reads it: a factor without a type stretches positions linearly.

    `yarn` has the fields of YaRN's settings that the family's files say in their own way, or not at all.
    """
    kind = keys["rope.scaling.type"]
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.wrong("rope.scaling.type", "none, linear or yarn")
    scaled = kind == "yarn" or keys["rope.scaling.factor"] is not None
    key = "rope.scaling.factor" if scaled else "rope.scale_linear"
    factor = keys[key]
    if kind == "none" or (factor in (None, 0.0, 1.0) and kind != "yarn"):
        return None
    if not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
        raise keys.wrong(key, "a number of at least 1")
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor}
    given = {field: keys[f"rope.scaling.{own}"] for field, own in _YARN.items()}
    return {"rope_type": "yarn", "factor": factor, **yarn, **{field: value for field, value in given.items() if value}}
