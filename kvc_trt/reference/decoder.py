"""A whole decoder that runs under any policy: prefill, compaction behind each layer's attention, cached decoding.

Prompts of a batch are computed one row at a time, so padding cannot leak; decoding takes the batch together. Positions
(what the rotary embedding sees) and cache lengths (what is stored) are separate: after eviction they differ. The last
prompt token belongs to prefill, so the first logits are those of exact attention; the released code's other choice, a
prompt one token shorter and a first sparse step, is not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvc_trt.reference import bounds, checks
from kvc_trt.reference.compaction import Compacted, compact
from kvc_trt.reference.dense import causal_attention, dense_attention
from kvc_trt.reference.layers import DecoderWeights, Rotary, Weights, linear, mlp, rms_norm

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.policies.parameters import PolicyParameters
    from kvc_trt.policies.registry import Method


@dataclass
class LayerCache:
    """What one layer stores; C slots for every row, of which the first lengths[b] are in use."""

    keys: Tensor
    """[B,G,C,D], after RoPE at the logical positions."""
    values: Tensor
    lengths: Tensor
    """int64 [B]"""
    page_min: Tensor | None
    """[B,G,P,D] where the policy selects by pages, else None; likewise page_max."""
    page_max: Tensor | None
    indices: Tensor
    """int32 [B,G,.]: the prompt positions that compaction kept, -1 past a row's end."""
    selected: Tensor | None = None
    """int32 [B,G,.]: the slots read by the latest step, None where all were."""

    @property
    def capacity(self) -> int:
        """C: slots per row."""
        return self.keys.shape[2]


@dataclass
class ReferenceCache:
    """The state of a decoding batch. `decode` advances it in place."""

    layers: list[LayerCache]
    positions: Tensor
    """int64 [B]: the logical position of each row's next token."""


class ReferenceDecoder:
    """One model under one policy, in float32 or float64.

    `method` offers compact and select (kvc_trt.policies.registry.Method) for the resolved `parameters`. With
    resident=False, weights are read again for every layer of every call and at most one layer of them is held.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, *, method: Method, parameters: PolicyParameters,
        dtype: torch.dtype = torch.float32, resident: bool = True,
    ) -> None:  # fmt: skip
        if dtype not in checks.FLOAT_TYPES:
            raise ValueError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
        if config.sliding_window is not None and parameters.max_sequence_len > config.sliding_window:
            limits = (
                f"a sequence of {parameters.max_sequence_len} and a sliding window of {config.sliding_window} tokens"
            )
            raise ValueError(f"parameters allow {limits}; expected a sequence within the window")
        self.config, self.method, self.parameters, self.dtype = config, method, parameters, dtype
        self._weights = DecoderWeights(config, weights, dtype, resident=resident)
        self._rotary = Rotary(config, parameters.max_sequence_len, dtype)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, ReferenceCache]:
        """Read prompts [B,S], right padded, of lengths [B]; returns the last token's logits [B,vocab] and the cache."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [B,S]")
        longest = min(input_ids.shape[1], self.parameters.max_input_len)
        rows = checks.lengths("prompt_lengths", prompt_lengths, input_ids.shape[0], 1, longest)
        hidden = [self._weights.embed(input_ids[b, :n]) for b, n in enumerate(rows)]
        layers = [
            self._prefill_layer(index, self._weights.layer(index), hidden, prompt_lengths)
            for index in range(self.config.num_hidden_layers)
        ]
        cache = ReferenceCache(layers, prompt_lengths.to(torch.int64).clone())
        return self._logits(torch.stack([x[-1] for x in hidden])), cache

    @torch.inference_mode()
    def decode(self, tokens: Tensor, cache: ReferenceCache) -> Tensor:
        """One step: tokens [B] enter the cache at their logical positions; returns the next logits [B,vocab]."""
        checks.lengths("tokens", tokens, len(cache.positions), 0, self.config.vocab_size - 1)
        for layer in cache.layers:
            checks.lengths("cache.lengths", layer.lengths, len(tokens), 0, layer.capacity - 1)
        hidden = self._weights.embed(tokens)
        for index, layer in enumerate(cache.layers):
            hidden = self._decode_layer(index, self._weights.layer(index), hidden, cache.positions, layer)
        cache.positions = cache.positions + 1
        return self._logits(hidden)

    def _prefill_layer(self, index: int, weights: Weights, hidden: list[Tensor], prompt_lengths: Tensor) -> LayerCache:
        """Every row's residual stream [n,hidden] through one layer, in place in the list; what the layer stores."""
        padded = self._empty_prompt([len(x) for x in hidden])
        for b, x in enumerate(hidden):
            query, keys, values = self._project(weights, x, torch.arange(len(x)))
            output = causal_attention(query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1))
            hidden[b] = self._finish(weights, x, output.transpose(0, 1))
            self._keep(padded, b, query, keys, values)
        return self._compact(index, *padded, prompt_lengths)

    def _decode_layer(
        self, index: int, weights: Weights, hidden: Tensor, positions: Tensor, layer: LayerCache
    ) -> Tensor:
        """The residual stream [B,hidden] of one token per row through one layer, whose cache is advanced in place."""
        query, keys, values = self._project(weights, hidden, positions)
        state = layer.keys, layer.values, layer.page_min, layer.page_max, layer.lengths
        bounds.append_in_place(*state, keys, values, page_size=self.parameters.page_size)
        layer.lengths = layer.lengths + 1
        return self._finish(weights, hidden, self._select(index, query, layer))

    def _project(self, weights: Weights, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N,H,D], keys and values [N,G,D] of N tokens at their positions."""
        config = self.config
        x = rms_norm(hidden, weights["input_layernorm.weight"], config.norm_epsilon)
        query, keys, values = (
            linear(weights, f"self_attn.{name}_proj", x).reshape(len(x), -1, config.head_size)
            for name in ("q", "k", "v")
        )
        if config.qk_norm:
            query = rms_norm(query, weights["self_attn.q_norm.weight"], config.norm_epsilon)
            keys = rms_norm(keys, weights["self_attn.k_norm.weight"], config.norm_epsilon)
        return self._rotary(query, positions), self._rotary(keys, positions), values

    def _finish(self, weights: Weights, hidden: Tensor, attention: Tensor) -> Tensor:
        """The rest of a layer: output projection and feed-forward, each added to the residual stream [N,hidden]."""
        hidden = hidden + linear(weights, "self_attn.o_proj", attention.flatten(1))
        x = rms_norm(hidden, weights["post_attention_layernorm.weight"], self.config.norm_epsilon)
        return hidden + mlp(weights, x)

    def _logits(self, hidden: Tensor) -> Tensor:
        norm = self._weights.tensor("model.norm.weight")
        return self._weights.logits(rms_norm(hidden, norm, self.config.norm_epsilon))

    def _empty_prompt(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """q_window [B,H,W,D], keys and values [B,G,S,D] to be filled row by row."""
        config, batch = self.config, len(rows)
        window = torch.zeros(
            batch, config.num_attention_heads, self.parameters.window, config.head_size, dtype=self.dtype
        )
        shape = (batch, config.num_key_value_heads, max(rows), config.head_size)
        return window, torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)

    def _keep(
        self, padded: tuple[Tensor, Tensor, Tensor], row: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        length, window = len(keys), min(len(query), self.parameters.window)
        padded[0][row, :, self.parameters.window - window :] = query[-window:].transpose(0, 1)
        padded[1][row, :, :length] = keys.transpose(0, 1)
        padded[2][row, :, :length] = values.transpose(0, 1)

    def _compact(
        self, index: int, q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor
    ) -> LayerCache:
        """Evict as the policy says, and make room for the tokens to come."""
        parameters, skipped = self.parameters, index < self.parameters.skip_layers
        kept: Compacted
        if skipped:
            kept = compact(q_window, keys, values, prompt_lengths, prompt_budget=keys.shape[2], pool_kernel=1)
        else:
            kept = self.method.compact(q_window, keys, values, prompt_lengths, parameters)
        room = [
            tensor.new_zeros(*tensor.shape[:2], parameters.layer_capacity(index), tensor.shape[3])
            for tensor in kept[:2]
        ]
        for target, source in zip(room, kept[:2], strict=True):
            target[:, :, : source.shape[2]] = source
        lengths = kept.lengths.to(torch.int64)
        pages: tuple[Tensor | None, Tensor | None] = (None, None)
        if parameters.decode_selection == "hybrid" and not skipped:
            pages = bounds.page_bounds(room[0], lengths, parameters.page_size)
        return LayerCache(room[0], room[1], lengths, *pages, kept.indices)

    def _select(self, index: int, query: Tensor, layer: LayerCache) -> Tensor:
        """Attention of one step [B,H,D], over what the policy reads."""
        if index < self.parameters.skip_layers:
            return dense_attention(query, layer.keys, layer.values, layer.lengths)
        state = layer.keys, layer.values, layer.lengths, layer.page_min, layer.page_max
        output, layer.selected = self.method.select(query, *state, self.parameters)
        return output
