"""A minimal Llama decoder with grouped-query attention, RoPE and SwiGLU; parameters carry the Hugging Face names.

Shapes: B batch, n tokens, E hidden, H query heads, G key-value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    """Causal self-attention; H/G query heads share one key-value head."""

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
        """x [B, n, E]; cos, sin [n, D]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H or G, n, D]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
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
        attended: Tensor = x + self.self_attn(self.input_layernorm(x), cos, sin)
        output: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return output


class Decoder(nn.Module):
    """Everything but the head; a module of its own because the names of the parameters say so."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class RetrievalTiny(nn.Module):
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
        logits: Tensor = self.lm_head(self.model.norm(x[:, positions]))
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
