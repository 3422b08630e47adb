"""Count a decoder's parameters and their bytes from its shape, without reading weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import DECAY, DECAY_BIAS, POSITIONS, expected_tensors
from kvc_trt.profile.floor import StepCost

QUANTISATION_BLOCK = 32
"""Weights that share one float16 scale."""

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"

_MATRIX_BYTES = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0 + 2.0 / QUANTISATION_BLOCK,
    "int4": 0.5 + 2.0 / QUANTISATION_BLOCK,
    "keep": 0.5 + 6.0 / QUANTISATION_BLOCK,
}
_TABLE_FORMAT = {"fp8": "bf16", "int4": "int8", "keep": "int8"}
"""Formats whose embedding, with a tied head, is in another."""
_ACTIVATION_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2, "int8": 4, "int4": 4, "keep": 4}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters, grouped by how a decode step uses them."""

    linear: int
    """Matrices inside the layers: read once per step, for any batch."""
    lm_head: int
    """The output matrix, read once per step; if it is tied, this is the embedding table."""
    embedding: int
    """The table from which a step gathers one row per sequence."""
    vectors: int
    """Parameters of norms and biases."""
    tied: bool
    positions: int = 0
    """The table of learned positions, from which a step gathers one row per sequence."""
    experts: int = 0
    """Matrices of all experts, of which a token reads `expert_share`."""
    expert_share: float = 0.0

    @property
    def total(self) -> int:
        """The number of parameters of the checkpoint; a tied output matrix counts once."""
        tables = self.embedding + self.positions + (0 if self.tied else self.lm_head)
        return self.linear + self.experts + self.vectors + tables

    @property
    def multiplied(self) -> int:
        """Elements of the layers' matrices that one token is multiplied with."""
        return self.linear + round(self.experts * self.expert_share)

    @property
    def active(self) -> int:
        """Number of parameters that one token needs, with the whole embedding table: a family's active parameters."""
        return self.total - self.experts + round(self.experts * self.expert_share)


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the decoder's parameters by their use."""
    sizes = {name: math.prod(shape) for name, shape in expected_tensors(model).items()}
    embedding = sizes.pop(_EMBEDDING)
    lm_head, positions = sizes.pop(_LM_HEAD, embedding), sizes.pop(POSITIONS, 0)
    of_vectors = ("norm.weight", ".bias", ".sinks", DECAY, DECAY_BIAS)
    vectors = sum(size for name, size in sizes.items() if name.endswith(of_vectors))
    experts, part = sum(size for name, size in sizes.items() if ".mlp.experts." in name), model.description.experts
    linear = sum(sizes.values()) - vectors - experts
    share = 0.0 if part is None else part.chosen / part.count
    return ParameterCount(linear, lm_head, embedding, vectors, model.tie_word_embeddings, positions, experts, share)


def prefill_operations(model: ModelConfig, tokens: int) -> float:
    """Return the operations of one prompt's prefill: its matrices, and the two products of causal attention."""
    heads = model.num_hidden_layers * model.num_attention_heads * model.head_size
    return 2.0 * count_parameters(model).multiplied * tokens + 2.0 * heads * tokens * tokens


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights in one format."""

    resident: float
    """The part that has to be in memory."""
    per_step: float
    """Bytes that a decode step of one row reads: everything but unused rows of the embedding table and other experts.

    Without experts it is the same for any batch."""
    experts: float = 0.0
    """The matrices of all experts, of which a row reads `expert_share`."""
    expert_share: float = 0.0

    def step(self, row_bytes: float, row_flops: float = 0.0) -> StepCost:
        """Return the cost of a step; each of its rows reads `row_bytes` of cache and takes `row_flops` operations."""
        return StepCost(self.per_step, row_bytes, row_flops, self.experts, self.expert_share)


def weight_bytes(model: ModelConfig, weights: str) -> WeightBytes:
    """Bytes of the weights in a format, fp32 to int4 (rotary tables and scales of rows, a few MB, left out).

    In fp8 the output matrix is in bf16, as in checkpoints; in int4 the embedding is in int8, and so is a tied head.
    Kept blocks are taken for Q4_1 with a table in 8 bits, an estimate: `engine_weights` counts those of a file.
    """
    parameters = count_parameters(model)
    vectors = parameters.vectors * _ACTIVATION_BYTES[weights]
    table = _TABLE_FORMAT.get(weights, weights)
    embedding = parameters.embedding * _MATRIX_BYTES[table]
    positions = parameters.positions * _ACTIVATION_BYTES[weights]
    lm_head = parameters.lm_head * _MATRIX_BYTES[table if parameters.tied or weights == "fp8" else weights]
    linear, experts = (count * _MATRIX_BYTES[weights] for count in (parameters.linear, parameters.experts))
    return WeightBytes(
        resident=linear + experts + vectors + embedding + positions + (0 if parameters.tied else lm_head),
        per_step=linear + experts * parameters.expert_share + vectors + lm_head,
        experts=experts,
        expert_share=parameters.expert_share,
    )


def cache_itemsize(weights: str) -> int:
    """Return the bytes of one cached element, which has the activations' type."""
    return _ACTIVATION_BYTES[weights]


def token_cache_bytes(model: ModelConfig, itemsize: int) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    return 2 * model.num_key_value_heads * model.head_size * itemsize
