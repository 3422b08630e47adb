"""The parts of a model that this adapter does not write: all but those of Llama."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvc_trt.models.config import LongRope, ModelConfig, Yarn
from kvc_trt.models.rope import query_scale

_NAMES = {"yarn": "YaRN", "longrope": "LongRoPE"}


def missing_part(model: ModelConfig) -> str | None:
    """Return every part that the model has and the adapter does not write; None if it writes the whole model."""
    found = [name for part in (_layers, _norms, _feed_forward, _numbers) for name, has in part(model) if has]
    return f"code for {', '.join(found)}" if found else None


Parts = Iterator[tuple[str, bool]]
"""The name of a part, and whether the model has it."""


def _layers(model: ModelConfig) -> Parts:
    kinds, own = model.description.attention, model.description
    yield "linear layers", any(one.linear is not None for one in kinds)
    yield "sliding layers", any(one.window is not None for one in kinds)
    yield "layers that do not rotate", not all(one.rotary for one in kinds)
    yield "rotary bases by layer", bool(model.rotary_bases)
    yield "gated attention", any(one.gated for one in kinds)
    yield "capped logits", own.attention_softcap is not None or own.logit_softcap is not None
    yield "sinks of attention", own.attention_sinks


def _norms(model: ModelConfig) -> Parts:
    norms = model.description.norms
    yield "LayerNorm", norms.kind != "rms"
    yield "norms without weights", not norms.weight
    yield "norms with biases", norms.bias
    yield "norms of results", norms.adds_norm
    yield "attention and feed-forward side by side", norms.side_by_side
    yield "norms of queries over all heads", model.qk_norm and norms.heads == "together"
    yield "norms of queries with weights for each head", model.qk_norm and norms.heads == "apart"


def _feed_forward(model: ModelConfig) -> Parts:
    own, block = model.description, model.description.feed_forward
    yield "experts", own.experts is not None
    yield "clamped gates", own.clamped_gate is not None
    yield "feed-forward blocks without a gate", not block.gated
    yield f"the activation {block.activation}", block.activation != "silu"
    yield "biases in the feed-forward block", block.bias


def _numbers(model: ModelConfig) -> Parts:
    own, scaling = model.description, model.rotary_scaling
    factor = isinstance(scaling, Yarn | LongRope) and scaling.attention_factor != 1
    yield "heads that rotate in part", model.rotary_channels != model.head_size
    yield "a scale of attention", query_scale(replace(model, rotary_scaling=None), 0) is not None
    yield f"the attention factor of {_NAMES.get(scaling.kind, '') if scaling else ''}", factor
    yield "a scale of embeddings", own.embedding_scale != 1
    yield "learned positions", own.learned_positions
    yield "a scale of what layers add", own.residual_scale != 1
    yield "a scale of logits", own.logit_scale != 1
