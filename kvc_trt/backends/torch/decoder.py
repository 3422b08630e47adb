"""One model under one policy in PyTorch, batched: the layers of the reference around `torch.ops.kvc`.

Written layer by layer like the graphs (`kvc_trt/graph/decoder.py`); a batch is [T, width] throughout, with T = batch *
sequence in prefill and T = batch in a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvc_trt.graph.state import uses_pages
from kvc_trt.kernels.ops import kvc
from kvc_trt.reference.layers import EMBEDDING, HEAD, DecoderWeights, Rotary, Weights, linear, mlp, rms_norm

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.policies.parameters import PolicyParameters

State = Mapping[str, Tensor]
"""The state tensors by name: k_cache.L, v_cache.L [B,G,C,D] and, where a layer has pages, bounds.L [B,G,2D,P]."""
OBSERVABLE = ("q_window", "keys", "values", "indices", "query", "attended", "selected")


class PromptResult(NamedTuple):
    """What a prefill leaves."""

    logits: Tensor
    """float32 [B,vocab], of each row's last token."""
    state: dict[str, Tensor]
    cache_lengths: Tensor
    """int64 [layers,B]"""


class TorchWeights:
    """A model's tensors on one device in one type; decoders of the same model under other policies may share them."""

    def __init__(self, config: ModelConfig, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        read = DecoderWeights(config, source, torch.float32, resident=False)
        self.layers: list[Weights] = [
            {name: tensor.to(device, dtype) for name, tensor in read.layer(index).items()}
            for index in range(config.num_hidden_layers)
        ]
        self.embedding = read.tensor(EMBEDDING).to(device, dtype)
        own_head = HEAD in source.names()  # a quantised tied head has values of its own
        self.head = read.tensor(HEAD).to(device, dtype) if own_head else self.embedding
        self.norm = read.tensor("model.norm.weight").to(device, dtype)


class TorchDecoder:
    """The arithmetic around the kernels, in the type of the weights and on their device; caches are `cache_dtype`.

    `expose` names values that each run leaves in `exposed`: q_window.L, keys.L, values.L and indices.L of compaction,
    query.L, attended.L and selected.L of a step.
    """

    def __init__(
        self, config: ModelConfig, parameters: PolicyParameters, weights: TorchWeights, *, cache_dtype: torch.dtype,
        expose: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.config, self.parameters, self.cache_dtype = config, parameters, cache_dtype
        self.exposed: dict[str, Tensor] = {}
        self._expose = frozenset(expose)
        self._weights, device = weights, weights.embedding.device
        self._rotary = Rotary(config, parameters.max_sequence_len, torch.float32)
        self._rotary.cos, self._rotary.sin = self._rotary.cos.to(device), self._rotary.sin.to(device)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, prompt_lengths: Tensor) -> PromptResult:
        """Prompts [B,S], right padded, of lengths [B], each compacted right behind its layer's attention."""
        batch, length = input_ids.shape
        hidden, state, lengths = self._weights.embedding[input_ids.flatten()], {}, []
        for layer in range(self.config.num_hidden_layers):
            hidden, kept, stored = self._prefill_layer(layer, hidden.view(batch, length, -1), prompt_lengths)
            state.update(kept)
            lengths.append(stored)
        rows = torch.arange(batch, device=hidden.device)
        last = hidden.view(batch, length, -1)[rows, prompt_lengths - 1]
        return PromptResult(self._logits(last), state, torch.stack(lengths))

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, cache_lengths: Tensor, state: State) -> Tensor:
        """One step of every row, in place in `state`: tokens, positions [B], cache_lengths [layers,B] -> [B,vocab]."""
        hidden = self._weights.embedding[tokens]
        for layer in range(self.config.num_hidden_layers):
            hidden = self._decode_layer(layer, hidden, positions, cache_lengths[layer], state)
        return self._logits(hidden)

    def _prefill_layer(
        self, layer: int, hidden: Tensor, prompt_lengths: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The residual stream [B,S,hidden] through one layer -> [T,hidden], what the layer stores and how much."""
        batch, length, _ = hidden.shape
        flat = hidden.flatten(0, 1)
        positions = torch.arange(length, device=hidden.device).repeat(batch)
        query, keys, values = (
            x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in self._project(layer, flat, positions)
        )
        attended = prefill_attention(query, keys, values)
        finished = self._finish(layer, flat, attended.transpose(1, 2).flatten(0, 1))
        keys, values = keys.to(self.cache_dtype), values.to(self.cache_dtype)
        if not self.parameters.is_compressed(layer):
            return finished, self._store_whole(layer, keys, values, prompt_lengths), prompt_lengths
        q_window = last_queries(query, prompt_lengths, self.parameters.window).to(self.cache_dtype)
        return finished, *self._compact(layer, q_window, keys, values, prompt_lengths)

    def _decode_layer(
        self, layer: int, hidden: Tensor, positions: Tensor, cache_lengths: Tensor, state: State
    ) -> Tensor:
        """The residual stream [B,hidden] of one token per row through one layer."""
        query, keys, values = (x.to(self.cache_dtype) for x in self._project(layer, hidden, positions))
        inputs = query, keys, values, state[f"k_cache.{layer}"], state[f"v_cache.{layer}"]
        if uses_pages(self.parameters, layer):
            rule = self.parameters
            attended, selected = kvc.hybrid_attention(
                *inputs, state[f"bounds.{layer}"], cache_lengths,
                rule.page_size, rule.top_r, rule.top_k, rule.token_budget, rule.dense_until,
            )  # fmt: skip
            self._see(layer, query=query, attended=attended, selected=selected)
        else:
            attended = kvc.dense_attention(*inputs, cache_lengths)
        return self._finish(layer, hidden, attended.to(hidden.dtype))

    def _project(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T,H,D], keys and values [T,G,D] of T tokens at their positions."""
        weights, config = self._weights.layers[layer], self.config
        x = self._norm(hidden, weights["input_layernorm.weight"])
        query, keys, values = (
            linear(weights, f"self_attn.{name}_proj", x).view(len(x), -1, config.head_size) for name in ("q", "k", "v")
        )
        if config.qk_norm:
            query = self._norm(query, weights["self_attn.q_norm.weight"])
            keys = self._norm(keys, weights["self_attn.k_norm.weight"])
        rotated = (self._rotary(x.float(), positions).to(x.dtype) for x in (query, keys))
        return next(rotated), next(rotated), values

    def _finish(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """The rest of a layer: output projection and feed-forward, each added to the residual stream [T,hidden]."""
        weights = self._weights.layers[layer]
        hidden = hidden + linear(weights, "self_attn.o_proj", attention.flatten(1))
        return hidden + mlp(weights, self._norm(hidden, weights["post_attention_layernorm.weight"]))

    def _compact(
        self, layer: int, q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        rule, paged = self.parameters, uses_pages(self.parameters, layer)
        page_size = rule.page_size if paged else rule.capacity  # one page, where nobody will ask for it
        k_cache, v_cache, bounds, lengths, indices = kvc.compact(
            q_window, keys, values, prompt_lengths, rule.prompt_budget, rule.capacity, rule.pool_kernel, page_size
        )
        self._see(layer, q_window=q_window, keys=keys, values=values, indices=indices)
        kept = {f"k_cache.{layer}": k_cache, f"v_cache.{layer}": v_cache}
        return kept | ({f"bounds.{layer}": bounds} if paged else {}), lengths

    def _store_whole(self, layer: int, keys: Tensor, values: Tensor, prompt_lengths: Tensor) -> dict[str, Tensor]:
        """The whole prompt in a cache with room for all that follows; padding becomes zero."""
        batch, heads, length, size = keys.shape
        padding = (torch.arange(length, device=keys.device) >= prompt_lengths[:, None])[:, None, :, None]
        kept = {}
        for name, tensor in (("k_cache", keys), ("v_cache", values)):
            cache = tensor.new_zeros(batch, heads, self.parameters.layer_capacity(layer), size)
            cache[:, :, :length] = tensor.masked_fill(padding, 0)
            kept[f"{name}.{layer}"] = cache
        return kept

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """In float32, whatever the type: squares of half types overflow."""
        return rms_norm(x.float(), weight.float(), self.config.norm_epsilon).to(x.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        return (self._norm(hidden, self._weights.norm) @ self._weights.head.T).float()

    def _see(self, layer: int, **values: Tensor) -> None:
        named = {f"{name}.{layer}": value for name, value in values.items()}
        self.exposed.update((name, value.clone()) for name, value in named.items() if name in self._expose)


def prefill_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Exact causal attention over whole prompts: [B,H,S,D], [B,G,S,D], [B,G,S,D] -> [B,H,S,D]."""
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)


def last_queries(query: Tensor, prompt_lengths: Tensor, window: int) -> Tensor:
    """Each row's last `window` queries, number i at n-W+i; before its start, the first: [B,H,S,D] -> [B,H,W,D]."""
    offsets = torch.arange(window, device=query.device) - window
    index = (prompt_lengths[:, None] + offsets).clamp(min=0)
    return query.gather(2, index[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
