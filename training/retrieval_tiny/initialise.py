"""Initial weights that let a small model find retrieval in minutes instead of hours."""

from __future__ import annotations

import math

import torch
from torch import nn

from training.retrieval_tiny.model import Attention, Layer, ModelShape, SmallLlama, rope_table

EMBEDDING_STD = 0.7  # with the usual .02 token identity drowns in the residual stream and matching by key never forms
RESIDUAL_SHARE = 0.5  # of the projections back into the stream
CONSTANT_CHANNEL = 0  # a channel of the embedding that has the same value for every token
CONSTANT_VALUE = 3.5
LOOK_BACK_FREQUENCIES = 6  # the fastest ones: slower ones cannot tell neighbours apart
LOOK_BACK_STRENGTH = 1.4
CONTENT_SHARE = 0.3  # what the content of a token contributes to the queries of a head that looks back


@torch.no_grad()
def initialise(model: SmallLlama) -> None:
    """Normal with std 1/sqrt(fan in), large embeddings, and a first layer whose head h attends h + 1 tokens back."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            share = RESIDUAL_SHARE if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=share / math.sqrt(weight.shape[1]))
    nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    _look_back(model)


def _look_back(model: SmallLlama) -> None:
    """Give each head of the first layer its offset.

    Matching a record means comparing the tokens one to four places earlier, its key among them. Queries and keys that
    come from a constant channel depend on position alone, through RoPE: the product peaks at the offset by which the
    query is turned back.
    """
    shape = model.shape
    layer = model.model.layers[0]
    assert isinstance(layer, Layer)
    attention = layer.self_attn
    model.model.embed_tokens.weight[:, CONSTANT_CHANNEL] = CONSTANT_VALUE
    attention.q_proj.weight *= CONTENT_SHARE
    for head in range(shape.num_attention_heads):
        point_back(attention, shape, head, head + 1, LOOK_BACK_STRENGTH)


@torch.no_grad()
def point_back(attention: Attention, shape: ModelShape, head: int, offset: int, strength: float) -> None:
    """Let one head attend the token `offset` back; its key-value head then serves all its query heads in this way."""
    cos, sin = rope_table(offset + 1, shape)  # row d: the turn of d tokens
    cosine, sine = torch.arange(LOOK_BACK_FREQUENCIES), torch.arange(LOOK_BACK_FREQUENCIES) + shape.head_dim // 2
    query = attention.q_proj.weight.view(shape.num_attention_heads, shape.head_dim, -1)[head]
    query[cosine, CONSTANT_CHANNEL] = strength * cos[offset, cosine]
    query[sine, CONSTANT_CHANNEL] = -strength * sin[offset, cosine]
    group = head * shape.num_key_value_heads // shape.num_attention_heads
    key = attention.k_proj.weight.view(shape.num_key_value_heads, shape.head_dim, -1)[group]
    key[cosine, CONSTANT_CHANNEL] = strength
    key[sine, CONSTANT_CHANNEL] = 0.0
