"""A GGUF file's metadata -> `ModelConfig`, for the architectures that the graphs can express.

The keys are translated to the fields of config.json and validated as those are; errors name the file's own keys.
What would change the numbers and is not understood is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import families
from kvc_trt.models.gguf.header import GgufHeader, GgufTensor, Scalar
from kvc_trt.models.gguf.names import EMBEDDING, HEAD, ROPE_FACTORS
from kvc_trt.models.gguf.rope_factors import check_shape, llama3_scaling
from kvc_trt.models.sources.hugging_face import parse_config

_WINDOW = "attention.sliding_window"
_LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"
"""The key of models whose norms are LayerNorm."""
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": _WINDOW,
}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""The end of a text, of a turn and of a message; a model may stop at any of them."""
_NEUTRAL: Mapping[str, Scalar] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.temperature_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "expert_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "rope.scaling.attn_factor": 1.0,
}
"""Keys that change what a model computes, and the value with which they do not: the only one that graphs compute."""
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


def model_config(header: GgufHeader, read: Callable[[GgufTensor], NDArray[Any]]) -> ModelConfig:
    """The model that the file describes; `read` is asked for its `rope_freqs.weight` alone, after a look at its shape.

    Raises InputError for what no graph computes.
    """
    name = header.scalar("general.architecture")
    known = architectures()
    if name not in known:
        raise InputError(
            f"{header.source}: general.architecture is {describe(name)}, expected one of {', '.join(known)}"
        )
    own = _OwnKeys(header, str(name))
    own.check_neutral()
    family = families()[known[str(name)]]
    keys = dict(_FIELDS)
    if own[_LAYER_NORM_EPSILON] is not None:
        keys["rms_norm_eps"] = _LAYER_NORM_EPSILON
    fields: dict[str, Any] = {field: own[key] for field, key in keys.items()}
    fields |= {
        "architectures": [family.architecture],
        "vocab_size": _vocabulary_size(own),
        "head_dim": _head_size(own),
        "tie_word_embeddings": HEAD not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "use_bias": "blk.0.ffn_up.bias" in header.tensors,
        "dtype": _DTYPES.get(header.tensors[EMBEDDING].type, "float32"),
        "bos_token_id": header.scalar("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(header, _vocabulary_size(own)) or None,
        "rope_scaling": _linear_scaling(own),
    }
    if fields["sliding_window"] is None:
        del fields["sliding_window"]  # null and absent differ for Mistral
    spelling = {field: own.spelled(key) for field, key in keys.items()}
    spelling |= {f"{kind}_token_id": f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos")}
    spelling |= {"head_dim": own.spelled("attention.key_length"), "rope_scaling": own.spelled("rope.scaling")}
    fields = {family.spelling.get(field, field): value for field, value in fields.items()}
    config = parse_config(fields, header.source, spelling=spelling)
    factors = header.tensors.get(ROPE_FACTORS)
    if factors is None:
        return config
    where = f"{header.source}: tensor {ROPE_FACTORS}"
    if config.rotary_scaling is not None:
        raise InputError(f"{where} beside {own.spelled('rope.scaling')}: expected one of them")
    check_shape(factors.shape, config.head_size, where)
    fields["rope_scaling"] = llama3_scaling(read(factors), config.rotary_base, config.head_size, where)
    return parse_config(fields, header.source, spelling=spelling)


@cache
def architectures() -> Mapping[str, str]:
    """Return `general.architecture` -> the class in Hugging Face's config.json. Files of Mistral usually say llama."""
    return {name: one.architecture for one in families().values() if one.gguf is not None for name in one.gguf.names}


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


class _OwnKeys:
    """The metadata under the architecture's name."""

    def __init__(self, header: GgufHeader, name: str) -> None:
        self.header = header
        self._name = name

    def __getitem__(self, key: str) -> Scalar | None:
        return self.header.scalar(self.spelled(key))

    def spelled(self, key: str) -> str:
        return f"{self._name}.{key}"

    def wrong(self, key: str, expected: str) -> InputError:
        return InputError(f"{self.header.source}: {self.spelled(key)} is {describe(self[key])}, expected {expected}")

    def check_neutral(self) -> None:
        for key, neutral in _NEUTRAL.items():
            if self[key] not in (None, neutral):
                raise self.wrong(key, f"{neutral}: nothing else is computed")
        if self._name != "mistral" and self[_WINDOW] not in (None, 0):
            raise self.wrong(_WINDOW, f"0: {self._name} has no sliding window")


def _vocabulary_size(own: _OwnKeys) -> int:
    """The rows of the embedding; the metadata may repeat them, but not contradict them."""
    embedding = own.header.tensors.get(EMBEDDING)
    if embedding is None:
        raise InputError(f"{own.header.source}: tensor {EMBEDDING} is missing")
    rows = embedding.shape[0]
    if own["vocab_size"] not in (None, rows):
        raise own.wrong("vocab_size", f"{rows}, the rows of {EMBEDDING}")
    return rows


def _head_size(own: _OwnKeys) -> Scalar | None:
    """`attention.key_length`, else the rotary width; values must be as wide, and all of a head must rotate."""
    size = own["attention.key_length"]
    if size is None:
        size = own["rope.dimension_count"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if size is not None and own[key] not in (None, size):
            raise own.wrong(key, f"{describe(size)}, the width of a head's keys")
    return size


def _linear_scaling(own: _OwnKeys) -> dict[str, Any] | None:
    """`rope.scaling` as llama.cpp reads it: a factor without a type stretches positions linearly."""
    kind = own["rope.scaling.type"]
    if kind not in (None, "none", "linear"):
        raise own.wrong("rope.scaling.type", "none or linear")
    key = "rope.scaling.factor" if own["rope.scaling.factor"] is not None else "rope.scale_linear"
    factor = own[key]
    if kind == "none" or factor in (None, 0.0, 1.0):
        return None
    if not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
        raise own.wrong(key, "a number of at least 1")
    return {"rope_type": "linear", "factor": factor}
