"""Initial weights that look up already: what is left to training is to make it exact, and to follow the questions.

The residual stream is divided into a constant channel, what the token is, what the four tokens before it are, and free
channels. The first layer fills in the four. The second carries the tokens six and seven places back, which is where an
answer that goes on finds the key it has just dealt with. The third compares the tokens up to the present one with the
tokens before each earlier one, and copies from where they agree: an induction head [1], sharp from the start.

[1] C. Olsson et al., "In-context Learning and Induction Heads", arXiv:2209.11895, 2022.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from training.retrieval_tiny.initialise import CONSTANT_CHANNEL, CONSTANT_VALUE, point_back
from training.retrieval_tiny.model import Attention, Layer, ModelShape, SmallLlama

HIDDEN, HEAD, HEADS, GROUPS = 160, 64, 4, 2
IDENTITY = slice(1, 48)
CODE = 20  # channels of the shorter code in which tokens are compared
BACK = tuple(slice(48 + CODE * i, 48 + CODE * (i + 1)) for i in range(HEADS))  # the tokens 1 to 4 back
COPIES = slice(48, 48 + CODE * HEADS)  # the last layer writes what it found over them
FREE = slice(48 + CODE * HEADS, HIDDEN)
FARTHER_BACK = {2: 6, 3: 7}  # head of the second layer: tokens back
FASTEST_OF_SLOW = 10  # pairs of channels from here on turn by less than one radian in 1,000 tokens

LOOK_BACK = 2.2
NOISE_SHARE = 0.3  # of the usual random weights of attention, from which training starts where nothing is set
CARRY = 0.65
MATCH = 1.2  # makes a token that agrees worth about four logits
READ_OUT = 0.25
SMALL = 0.05


def shape_for(vocab_size: int) -> ModelShape:
    """The shape that the channels above are laid out for."""
    return ModelShape(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=224,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        rope_theta=1e10,  # most channels hardly turn within the longest context, and can compare what tokens are
    )


@torch.no_grad()
def initialise(model: SmallLlama) -> None:
    """Set all weights of a model of this shape, from torch's random generator."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            residual = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            share = residual * (NOISE_SHARE if "self_attn" in name else 1.0)
            nn.init.normal_(weight, std=share / math.sqrt(weight.shape[1]))
    first, second, third = (layer.self_attn for layer in model.model.layers if isinstance(layer, Layer))
    code = _embed(model.model.embed_tokens.weight)
    _remember_four_back(model.shape, first, code)
    _carry_from_farther_back(model.shape, second)
    _match_and_copy(third, code)
    copied = _write_copies(third)
    nn.init.normal_(model.lm_head.weight, std=SMALL)
    model.lm_head.weight[:, COPIES] += READ_OUT * model.model.embed_tokens.weight[:, IDENTITY] @ copied.T


def _embed(embedding: Tensor) -> Tensor:
    """Random identities of equal length; returns the code [CODE, identity], in which they have equal length as well.

    Equal lengths make all tokens equally strong, before and after the norms.
    """
    width = IDENTITY.stop - IDENTITY.start
    basis = _orthonormal(width, width)
    parts = [
        nn.functional.normalize(torch.randn(len(embedding), size)) * math.sqrt(size) for size in (CODE, width - CODE)
    ]
    nn.init.normal_(embedding, std=SMALL)
    embedding[:, IDENTITY] = torch.cat(parts, dim=1) @ basis
    embedding[:, CONSTANT_CHANNEL] = CONSTANT_VALUE
    return basis[:CODE]


def _remember_four_back(shape: ModelShape, attention: Attention, code: Tensor) -> None:
    for head in range(HEADS):
        point_back(attention, shape, head, head + 1, LOOK_BACK)
        _output_of(attention, head)[BACK[head], : code.shape[1]] += CARRY * code
    _copy_identity(attention)


def _carry_from_farther_back(shape: ModelShape, attention: Attention) -> None:
    """Into the free channels go the codes of the three tokens before the one that is looked back to."""
    codes = BACK[:3]
    width = CODE * len(codes)
    for head, offset in FARTHER_BACK.items():
        point_back(attention, shape, head, offset, LOOK_BACK)
        _output_of(attention, head)[FREE, :width] += CARRY * _orthonormal(FREE.stop - FREE.start, width)
    value = _rows(attention.v_proj.weight, GROUPS - 1)
    value[:width, codes[0].start : codes[-1].stop] += torch.eye(width)


def _match_and_copy(attention: Attention, code: Tensor) -> None:
    """Queries of the present token and the three before it meet keys of the four tokens before each place."""
    half = torch.arange(FASTEST_OF_SLOW, HEAD // 2)
    slow = torch.cat([half, half + HEAD // 2])
    for group in range(GROUPS):
        places = [MATCH * _orthonormal(len(slow), CODE) for _ in BACK]
        key = _rows(attention.k_proj.weight, group)
        for place, back in zip(places, BACK, strict=True):
            key[slow, back] += place
        for head in range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS):
            query = _rows(attention.q_proj.weight, head)
            query[slow, IDENTITY] += places[0] @ code
            for place, back in zip(places[1:], BACK[:-1], strict=True):
                query[slow, back] += place
    _copy_identity(attention)


def _write_copies(attention: Attention) -> Tensor:
    """Returns the directions [COPIES, identity] in which all heads write the token that they found."""
    width = IDENTITY.stop - IDENTITY.start
    directions = _orthonormal(COPIES.stop - COPIES.start, width)
    for head in range(HEADS):
        _output_of(attention, head)[COPIES, :width] += directions
    return directions


def _copy_identity(attention: Attention) -> None:
    width = IDENTITY.stop - IDENTITY.start
    for group in range(GROUPS):
        _rows(attention.v_proj.weight, group)[:width, IDENTITY] += torch.eye(width)


def _rows(weight: Tensor, head: int) -> Tensor:
    """What a projection gives to one head: [HEAD, E], to be changed in place."""
    return weight[head * HEAD : (head + 1) * HEAD]


def _output_of(attention: Attention, head: int) -> Tensor:
    """What the output projection makes of one head: [E, HEAD], to be changed in place."""
    return attention.o_proj.weight[:, head * HEAD : (head + 1) * HEAD]


def _orthonormal(rows: int, columns: int) -> Tensor:
    """A random matrix with orthonormal columns, or rows where they are fewer."""
    tall: Tensor = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns)))[0]
    return tall if rows > columns else tall.T
