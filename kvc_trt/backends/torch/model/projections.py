"""The part of a layer that needs one token alone: products, norms and rotations, block by block over a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvc_trt.backends.torch.model.elementwise import Elementwise
from kvc_trt.models.rope import rotary_tables
from kvc_trt.reference.layers import linear

if TYPE_CHECKING:
    from kvc_trt.backends.torch.model.weights import TorchWeights
    from kvc_trt.models.config import ModelConfig


class Projections:
    """The products of one model, in the type and on the device of its weights.

    Positions are those before `length`. `elementwise` has the functions between the products, `block` is the tokens
    that are computed at once over a prompt.
    """

    def __init__(
        self, config: ModelConfig, weights: TorchWeights, length: int, elementwise: Elementwise, block: int
    ) -> None:
        self.config = config
        self._weights, self._run, self._block = weights, elementwise, block
        self._heads = config.num_attention_heads, config.num_key_value_heads
        device = weights.embedding.device
        self._cos, self._sin = (torch.from_numpy(table).to(device) for table in rotary_tables(config, length))

    @property
    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, float32 [L,D/2]."""
        return self._cos, self._sin

    @property
    def rotary_bytes(self) -> int:
        """Size of the rotary tables in bytes."""
        return self._cos.nbytes + self._sin.nbytes

    def plain_tokens(self, layer: int, hidden: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Project tokens of the residual stream before the rotary embedding to queries [B,S,H,D], keys [B,S,G,D]."""
        return self._project(layer, hidden, batch, self._unrotated(len(hidden)))[:2]

    def plain_token(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project N normed tokens before the rotary embedding to queries [N,H,D], keys [N,G,D]."""
        return self._split(layer, x, *self._angles(self._unrotated(len(x))))[:2]

    def _unrotated(self, count: int) -> Tensor:
        """Return positions that rotate nothing."""
        return torch.zeros(count, dtype=torch.int64, device=self._cos.device)

    def _project(self, layer: int, hidden: Tensor, batch: int, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens at positions `places` [T], block by block, to queries [B,S,H,D], keys and values [B,S,G,D]."""
        (heads, kv_heads), size = self._heads, self.config.head_size
        length = len(hidden) // batch
        parts = [hidden.new_empty(len(hidden), count, size) for count in (heads, kv_heads, kv_heads)]
        for rows in self._blocks(len(hidden)):
            x = self._norm(hidden[rows], self._weights.layers[layer]["input_layernorm.weight"])
            made = self._split(layer, x, *self._angles(places[rows]))
            for whole, part in zip(parts, made, strict=True):
                whole[rows] = part
        query, keys, values = (part.view(batch, length, *part.shape[1:]) for part in parts)
        return query, keys, values

    def _finish(self, layer: int, hidden: Tensor, attended: Tensor) -> None:
        """Add output projection and feed-forward to the residual stream, in place."""
        weights = self._weights.layers[layer]
        for rows in self._blocks(len(hidden)):
            update = self._output(layer, attended[rows])
            added, x = self._add(hidden[rows], update, weights["post_attention_layernorm.weight"])
            torch.add(added, self._feed_forward(layer, x), out=hidden[rows])

    def _split(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project N normed tokens to queries [N,H,D], keys and values [N,G,D], rotated to their positions."""
        weights = self._weights.layers[layer]
        norms = weights.get("self_attn.q_norm.weight"), weights.get("self_attn.k_norm.weight")
        return self._run.rotated_heads(self._join(layer, x), cos, sin, *norms, self._heads, self.config.norm_epsilon)

    def _join(self, layer: int, x: Tensor) -> Tensor:
        """Project N normed tokens to queries, keys and values side by side [N,(H+2G)*D], not rotated yet."""
        return linear(self._weights.layers[layer], "self_attn.qkv_proj", x)

    def _output(self, layer: int, attended: Tensor) -> Tensor:
        """Project attention's output back: [N,H*D] -> [N,hidden]."""
        return linear(self._weights.layers[layer], "self_attn.o_proj", attended)

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """Apply the gated block: [N,hidden] -> [N,hidden]."""
        weights = self._weights.layers[layer]
        return linear(weights, "mlp.down_proj", self._run.gated(linear(weights, "mlp.gate_up_proj", x)))

    def _logits(self, x: Tensor) -> Tensor:
        """Project normed tokens to float32 logits: [N,hidden] -> [N,vocab]."""
        return float_product(x, self._weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._run.normed(x, weight, self.config.norm_epsilon)

    def _add(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self._run.added_and_normed(hidden, update, weight, self.config.norm_epsilon)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [N,D/2] of positions [N]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _blocks(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self._block):
            yield slice(start, min(start + self._block, tokens))


def float_product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply x [N,in] by matrix [out,in] to float32 [N,out]: logits rounded to 16 bits would have false ties."""
    if x.dtype == torch.float32:
        return x @ matrix.T
    if x.device.type == "cpu":
        return x.float() @ matrix.float().T
    return torch.mm(x, matrix.T, out_dtype=torch.float32)
