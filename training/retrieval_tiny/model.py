"""A minimal Llama decoder with grouped-query attention, RoPE and SwiGLU; parameters carry the Hugging Face names.

Shapes: B batch, n tokens, E hidden, H query heads, G key-value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.retrieval_tiny.branches import Branches


@dataclass(frozen=True)
class ModelShape:
    """The fields of config.json that fix the parameters; names are those of `transformers.LlamaConfig`."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 4096
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5


class Attention(nn.Module):
    """Self-attention; H/G query heads share one key-value head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width = shape.num_attention_heads * shape.head_dim
        cache_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, cache_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, cache_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal; x [B, n, E], as the result; cos, sin [n, D]."""
        q, k, v = (self._heads(projection, x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self._output(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    def of_branches(self, x: Tensor, cos: Tensor, sin: Tensor, branches: Branches, *, answers_only: bool) -> Tensor:
        """What tokens of `branches` may see; x [B, n, E], as the result, or [B, T, E] of the answers alone."""
        k, v = rotate(self._heads(self.k_proj, x), cos, sin), self._heads(self.v_proj, x)
        end, asking = branches.context, branches.answers if answers_only else slice(None)
        q = rotate(self._heads(self.q_proj, x[:, asking]), cos[asking], sin[asking])
        if answers_only:
            visible = branches.visible[branches.answers - end]
            return self._output(F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True))
        context = F.scaled_dot_product_attention(
            q[:, :, :end], k[:, :, :end], v[:, :, :end], is_causal=True, enable_gqa=True
        )
        rest = F.scaled_dot_product_attention(q[:, :, end:], k, v, attn_mask=branches.visible, enable_gqa=True)
        return self._output(torch.cat([context, rest], dim=2))

    def _heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """[B, n, E] to [B, H or G, n, D]."""
        heads: Tensor = projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def _output(self, context: Tensor) -> Tensor:
        """[B, H, n, D] to [B, n, E]."""
        output: Tensor = self.o_proj(context.transpose(1, 2).flatten(2))
        return output


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer, arXiv:2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, n, E], as the result."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, n, E], as the result; cos, sin [n, D]."""
        return self._add(x, self.self_attn(self.input_layernorm(x), cos, sin))

    def of_branches(self, x: Tensor, cos: Tensor, sin: Tensor, branches: Branches, *, answers_only: bool) -> Tensor:
        """As forward; the result is [B, T, E] with `answers_only`."""
        attended = self.self_attn.of_branches(self.input_layernorm(x), cos, sin, branches, answers_only=answers_only)
        return self._add(x[:, branches.answers] if answers_only else x, attended)

    def _add(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Decoder(nn.Module):
    """Everything but the head; a module of its own because the names of the parameters say so."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class SmallLlama(nn.Module):
    """Embedding, layers and an untied head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, T, vocab] of the token after each of the `positions` [T] of `ids` [B, n]."""
        cos, sin = rope_table(ids.shape[1], self.shape)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self._head(x[:, positions])

    def of_branches(self, ids: Tensor, branches: Branches) -> Tensor:
        """Logits [B, T, vocab] of the token after each of the `answers` of branches; ids [B, n].

        The last layer computes nothing else, which is a large part of a batch.
        """
        cos, sin = (table[branches.positions] for table in rope_table(ids.shape[1], self.shape))
        x = self.model.embed_tokens(ids)
        layers = [layer for layer in self.model.layers if isinstance(layer, Layer)]
        for layer in layers:
            x = layer.of_branches(x, cos, sin, branches, answers_only=layer is layers[-1])
        return self._head(x)

    def _head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits


def rope_table(length: int, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """cos and sin [length, D] of positions 0..length-1; the halves of D share D/2 frequencies (Hugging Face layout)."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angle = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-exponent).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., arXiv:2104.09864): channel i is paired with channel i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
