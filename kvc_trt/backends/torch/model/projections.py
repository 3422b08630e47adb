"""The parts of a layer that treat each token alone: products, norms and rotations, block by block over a prompt."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from kvc_trt.backends.torch.model.elementwise import Elementwise
from kvc_trt.backends.torch.model.experts import mixed
from kvc_trt.backends.torch.model.linear_layers import gated_output
from kvc_trt.backends.torch.model.shaped_attention import capped
from kvc_trt.models.rope import query_scale, rotary_tables
from kvc_trt.models.weights import ATTENTION_GATE, ATTENTION_RESULT_NORM, FEED_FORWARD_RESULT_NORM
from kvc_trt.reference.layers import linear

if TYPE_CHECKING:
    from kvc_trt.backends.torch.model.weights import TorchWeights
    from kvc_trt.models.config import ModelConfig


Result = TypeVar("Result")


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
        self._norms = config.description.norms
        self._heads = config.num_attention_heads, config.num_key_value_heads
        device = weights.embedding.device
        self._rotary = {
            base: tuple(torch.from_numpy(table).to(device) for table in rotary_tables(config, length, own_base=base))
            for base in (None, *config.rotary_bases)
        }
        self._positions = length
        dtype = weights.embedding.dtype
        self._query_scales = [
            None if factors is None else torch.from_numpy(factors).to(device, dtype)
            for factors in (query_scale(config, layer) for layer in range(config.num_hidden_layers))
        ]

    @property
    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, float32 [L,D/2], in layers without a base of their own."""
        cosine, sine = self._rotary[None]
        return cosine, sine

    @property
    def rotary_bytes(self) -> int:
        """The size of the rotary tables in bytes."""
        return sum(table.nbytes for tables in self._rotary.values() for table in tables)

    def plain_tokens(self, layer: int, hidden: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Project tokens of the residual stream before the rotary embedding to queries [B,S,H,D], keys [B,S,G,D]."""
        return self._project(layer, hidden, batch, self._unrotated(len(hidden)))[:2]

    def plain_token(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project N normed tokens before the rotary embedding to queries [N,H,D], keys [N,G,D]."""
        return self._split(layer, x, *self._angles(layer, self._unrotated(len(x))))[:2]

    def _unrotated(self, count: int) -> Tensor:
        """Return `count` positions 0, at which the rotary embedding changes nothing."""
        return torch.zeros(count, dtype=torch.int64, device=self._weights.embedding.device)

    def _project(self, layer: int, hidden: Tensor, batch: int, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens at positions `places` [T], block by block, to queries [B,S,H,D], keys and values [B,S,G,D]."""
        return finished(self._project_in_pieces(layer, hidden, batch, places))

    def _project_in_pieces(
        self, layer: int, hidden: Tensor, batch: int, places: Tensor
    ) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
        """Like `_project`, one block per `next`."""
        (heads, kv_heads), size = self._heads, self.config.head_size
        length = len(hidden) // batch
        parts = [hidden.new_empty(len(hidden), count, size) for count in (heads, kv_heads, kv_heads)]
        for rows in self._blocks(len(hidden)):
            x = self._read(layer, "input_layernorm", hidden[rows])
            made = self._split(layer, x, *self._angles(layer, places[rows]))
            for whole, part in zip(parts, made, strict=True):
                whole[rows] = part
            yield
        query, keys, values = (part.view(batch, length, *part.shape[1:]) for part in parts)
        return query, keys, values

    def _embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the residual stream before the first layer: tokens [T] at positions `places` [T] -> [T,hidden]."""
        rows, scale = functional.embedding(tokens, self._weights.embedding), self.config.description.embedding_scale
        rows = rows if scale == 1 else rows * scale
        learned = self._weights.positions
        return rows if learned is None else rows + functional.embedding(places, learned)

    def _finish(self, layer: int, hidden: Tensor, attended: Tensor) -> None:
        """Add output projection and feed-forward to the residual stream, in place."""
        finished(self._finish_in_pieces(layer, hidden, attended))

    def _finish_in_pieces(self, layer: int, hidden: Tensor, attended: Tensor) -> Generator[None, None, None]:
        """Like `_finish`, one block per `next`."""
        for rows in self._blocks(len(hidden)):
            x = self._read(layer, "input_layernorm", hidden[rows]) if self._reads_again(layer) else None
            before, update = self._before_next(layer, hidden[rows], x, attended[rows])
            torch.add(before, update, out=hidden[rows])
            yield

    def _before_next(self, layer: int, hidden: Tensor, x: Tensor | None, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream after a layer's attention [N,H*D], and the feed-forward update to add to it.

        `x` is the input of attention; None unless another part of the layer reads it, too (`_reads_again`).
        """
        update = self._added(layer, ATTENTION_RESULT_NORM, self._output(layer, attended, x))
        if self._norms.side_by_side:
            if self._norms.place != "shared":
                x = self._read(layer, "post_attention_layernorm", hidden)
            hidden = hidden + update
        else:
            hidden, x = self._add(layer, "post_attention_layernorm", hidden, update)
        assert x is not None
        return hidden, self._added(layer, FEED_FORWARD_RESULT_NORM, self._feed_forward(layer, x))

    def _read(self, layer: int, name: str, hidden: Tensor) -> Tensor:
        """Return the input of attention or feed-forward: a norm of the residual stream, or the stream itself."""
        return self._norm(layer, name, hidden) if self._norms.reads_norm else hidden

    def _added(self, layer: int, name: str, update: Tensor) -> Tensor:
        """Return the update that a block adds to the stream: its result or the norm of it, times the model's scale."""
        if self._norms.adds_norm:
            update = self._norm(layer, name, update)
        scale = self.config.description.residual_scale
        return update if scale == 1 else update * scale

    def _split(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project N normed tokens to queries [N,H,D], keys and values [N,G,D], rotated to their positions."""
        weights = self._weights.layers[layer]
        norms = [weights.get(f"self_attn.{name}_norm.weight") for name in "qk"]
        if self.config.description.norms.heads == "apart":
            norms = [norm.view(-1, self.config.head_size) for norm in norms if norm is not None]
        constants = self._heads, self.config.norm_epsilon, self._query_scales[layer]
        return self._run.rotated_heads(self._join(layer, x), cos, sin, *norms, *constants)

    def _join(self, layer: int, x: Tensor) -> Tensor:
        """Project N normed tokens to queries, keys and values side by side [N,(H+2G)*D], not rotated yet."""
        return linear(self._weights.layers[layer], "self_attn.qkv_proj", x)

    def _reads_again(self, layer: int) -> bool:
        """Return whether a gate, or the feed-forward block, reads the input of attention, too."""
        attention = self.config.attention(layer)
        return self._norms.place == "shared" or attention.gated or attention.linear is not None

    def _output(self, layer: int, attended: Tensor, x: Tensor | None) -> Tensor:
        """Project attention's output back: [N,H*D] -> [N,hidden]; a gate reads the input of attention, x [N,hidden].

        For a linear layer, `attended` holds the values read from its memory [N,H*Dv].
        """
        weights, attention = self._weights.layers[layer], self.config.attention(layer)
        if attention.linear is not None:
            assert x is not None
            return gated_output(weights, attention.linear, attended, x, self.config.norm_epsilon)
        if attention.gated:
            assert x is not None
            attended = attended * torch.sigmoid(linear(weights, ATTENTION_GATE, x))
        return linear(weights, "self_attn.o_proj", attended)

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """Apply the feed-forward block: [N,hidden] -> [N,hidden]."""
        weights, part = self._weights.layers[layer], self.config.description.feed_forward
        experts = self.config.experts(layer)
        if experts is not None:
            return mixed(weights, x, experts, self.config.description.clamped_gate)
        activate = self._run.gated if part.gated else self._run.activated
        inner = activate(linear(weights, "mlp.gate_up_proj", x), part.activation)
        return linear(weights, "mlp.down_proj", inner)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Project the residual stream after the last layer to float32 logits: [N,hidden] -> [N,vocab]."""
        return self._project_to_vocabulary(self._norm(None, "", hidden))

    def _project_to_vocabulary(self, x: Tensor) -> Tensor:
        """Project normed tokens to float32 logits: [N,hidden] -> [N,vocab]."""
        logits, scale = float_product(x, self._weights.head), self.config.description.logit_scale
        logits = logits if scale == 1 else logits * scale
        return capped(logits, self.config.description.logit_softcap)

    def _norm(self, layer: int | None, name: str, x: Tensor) -> Tensor:
        """Apply a norm of a layer, or the one after the last layer (None)."""
        weight, bias = self._norm_weights(layer, name)
        return self._run.normed(x, weight, self.config.norm_epsilon, bias, self._norms.kind)

    def _add(self, layer: int | None, name: str, hidden: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream after an update, and the input of the next part of the model."""
        if layer is not None and not self._norms.reads_norm:
            hidden = hidden + update
            return hidden, hidden
        weight, bias = self._norm_weights(layer, name)
        constants = self.config.norm_epsilon, bias, self._norms.kind
        return self._run.added_and_normed(hidden, update, weight, *constants)

    def _norm_weights(self, layer: int | None, name: str) -> tuple[Tensor | None, Tensor | None]:
        if layer is None:
            return self._weights.norm, self._weights.norm_bias
        weights = self._weights.layers[layer]
        return weights.get(f"{name}.weight"), weights.get(f"{name}.bias")

    def _angles(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's cosines and sines [N,D/2] of positions [N]; of position 0 for a layer without rotation."""
        attention = self.config.attention(layer)
        if not attention.rotary:
            positions = torch.zeros_like(positions)
        cosine, sine = self._rotary[attention.rotary_base]
        return cosine.index_select(0, positions), sine.index_select(0, positions)

    def _blocks(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self._block):
            yield slice(start, min(start + self._block, tokens))


def finished(pieces: Generator[None, None, Result]) -> Result:
    """Run all pieces and return their result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result


def float_product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply x [N,in] by matrix [out,in] to float32 [N,out]: logits rounded to 16 bits would have false ties."""
    if x.dtype == torch.float32:
        return x @ matrix.T
    if x.device.type == "cpu":
        return x.float() @ matrix.float().T
    return torch.mm(x, matrix.T, out_dtype=torch.float32)
