"""How many parameters a decoder has, and how many bytes they are, from its shape alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from kvc_trt.models.config import ModelConfig

QUANTISATION_BLOCK = 32
"""Weights that share one float32 scale in the MatMulNBits layout."""

_MATRIX_BYTES = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1.0 + 4.0 / QUANTISATION_BLOCK,
    "int4": 0.5 + 4.0 / QUANTISATION_BLOCK,
}
_EMBEDDING_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "int4": 2}
_ACTIVATION_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 4, "int4": 4}

WEIGHT_FORMATS = tuple(_MATRIX_BYTES)
"""Every weight format an engine can have."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by the way a decode step uses them."""

    linear: int
    """Matrices inside the layers: read once per step, whatever the batch."""
    lm_head: int
    """The output matrix, read once per step; where it is tied, the embedding table plays its part."""
    embedding: int
    """The table a step gathers one row per sequence from."""
    vectors: int
    """Norms and biases."""
    tied: bool

    @property
    def total(self) -> int:
        """Parameters of the checkpoint; a tied output matrix counts once."""
        return self.linear + self.vectors + self.embedding + (0 if self.tied else self.lm_head)


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Counts a Llama-like decoder: q, k, v, o, the gated MLP, norms, biases, embedding and output matrix."""
    hidden, layers = model.hidden_size, model.num_hidden_layers
    queries = model.num_attention_heads * model.head_size
    keys = model.num_key_value_heads * model.head_size
    matrices = hidden * (2 * queries + 2 * keys) + 3 * hidden * model.intermediate_size
    vectors = 2 * hidden
    vectors += queries + 2 * keys if model.qkv_bias else 0
    vectors += hidden if model.output_bias else 0
    vectors += 2 * model.head_size if model.qk_norm else 0
    table = model.vocab_size * hidden
    return ParameterCount(
        linear=layers * matrices,
        lm_head=table,
        embedding=table,
        vectors=layers * vectors + hidden,
        tied=model.tie_word_embeddings,
    )


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights in one format."""

    resident: float
    """What has to lie in memory."""
    per_step: float
    """What one decode step reads, whatever its batch: everything but the embedding table's other rows."""


def weight_bytes(model: ModelConfig, weights: str) -> WeightBytes:
    """Bytes of the weights in `fp32`, `fp16`, `bf16`, `int8` or `int4` (rotary tables, a few MB, left out)."""
    parameters = count_parameters(model)
    # A tied table cannot be quantised and gathered from at once: quantised engines keep both forms.
    shares_table = parameters.tied and weights not in ("int8", "int4")
    vectors = parameters.vectors * _ACTIVATION_BYTES[weights]
    embedding = parameters.embedding * _EMBEDDING_BYTES[weights]
    lm_head = parameters.lm_head * _MATRIX_BYTES[weights]
    linear = parameters.linear * _MATRIX_BYTES[weights]
    return WeightBytes(
        resident=linear + vectors + embedding + (0 if shares_table else lm_head), per_step=linear + vectors + lm_head
    )


def cache_itemsize(weights: str) -> int:
    """Bytes of one cached element: the cache has the activations' type."""
    return _ACTIVATION_BYTES[weights]


def token_cache_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of one token's keys and values in one layer."""
    return 2 * model.num_key_value_heads * model.head_size * itemsize
