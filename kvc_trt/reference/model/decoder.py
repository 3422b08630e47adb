"""A whole decoder under any policy: prefill, compaction after each layer's attention, cached decoding.

Prefill computes one row at a time, so padding cannot leak; decoding computes the batch together. Positions (for the
rotary embedding) and cache lengths (the numbers of stored tokens) are separate: after eviction they differ. The last
prompt token is part of prefill, so the first logits come from exact attention. The released code's alternative, a
prompt one token shorter and a first sparse step, is not offered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.rope import query_scale
from kvc_trt.models.weights import (
    ATTENTION_GATE,
    ATTENTION_RESULT_NORM,
    FEED_FORWARD_RESULT_NORM,
    POSITIONS,
    SINKS,
    WeightSource,
)
from kvc_trt.reference import checks
from kvc_trt.reference.cache import LayerCache, ReferenceCache
from kvc_trt.reference.dense import causal_attention
from kvc_trt.reference.layers import DecoderWeights, Rotary, Weights, layer_norm, linear, mlp, rms_norm
from kvc_trt.reference.linear import LinearState, linear_attention
from kvc_trt.reference.model.caching import LayerCaches, Projected, ReadBack
from kvc_trt.reference.model.experts import mixed
from kvc_trt.reference.model.rules import Method, Rule
from kvc_trt.reference.model.squeeze import squeeze
from kvc_trt.reference.softmax import Softmax


class ReferenceDecoder:
    """One model under one policy, in float32 or float64.

    `method` implements compact and select for the resolved `parameters`. With resident=False, every call reads the
    weights again and holds at most one layer of them.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, *, method: Method, parameters: Rule,
        dtype: torch.dtype = torch.float32, resident: bool = True,
    ) -> None:  # fmt: skip
        if dtype not in checks.FLOAT_TYPES:
            raise ValueError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
        self.config, self.parameters, self.dtype = config, parameters, dtype
        self._parts = config.description
        self._weights = DecoderWeights(config, weights, dtype, resident=resident)
        longest = parameters.max_sequence_len
        covered = max(longest, parameters.future_positions)
        self._rotary = {
            base: Rotary(config, covered, dtype, longest=longest, own_base=base)
            for base in (None, *config.rotary_bases)
        }
        self._caches = LayerCaches(config, parameters, method, self._rotary[None])
        self._prompt_budgets: list[tuple[int, ...]] | None = None
        self._routes: Callable[[int, Tensor, int], Tensor] | None = None

    @property
    def method(self) -> Method:
        """The method that decides which tokens are kept and which are read; it can be replaced."""
        return self._caches.method

    @method.setter
    def method(self, method: Method) -> None:
        self._caches.method = method

    def follow(self, read_back: ReadBack) -> None:
        """Read keys and values back from caches by `read_back`, instead of by the rule's format."""
        self._caches.read_back = read_back

    def follow_routes(self, routes: Callable[[int, Tensor, int], Tensor]) -> None:
        """Choose experts, int64 [N,count], by `routes` of a layer, its router's logits [N,experts], and their count."""
        self._routes = routes

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, ReferenceCache]:
        """Run prompts [B,S], right padded, of lengths [B]; return the last tokens' logits [B,vocab] and the cache."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [B,S]")
        longest = min(input_ids.shape[1], self.parameters.max_input_len)
        rows = checks.lengths("prompt_lengths", prompt_lengths, input_ids.shape[0], 1, longest)
        hidden = [self._embed(input_ids[b, :n], torch.arange(n)) for b, n in enumerate(rows)]
        self._set_prompt_budgets(input_ids, prompt_lengths)
        cache = ReferenceCache([], prompt_lengths.to(torch.int64).clone())
        for index in range(self.config.num_hidden_layers):
            weights, state = self._weights.layer(index), self._empty_state(index, len(rows))
            if state is None:
                cache.caches += self._prefill_layer(index, weights, hidden, prompt_lengths)
            else:
                cache.linear[index] = state
                hidden = self._linear_layer(index, weights, hidden, state)
        return self._logits(torch.stack([x[-1] for x in hidden])), cache

    @torch.inference_mode()
    def decode(self, tokens: Tensor, cache: ReferenceCache) -> Tensor:
        """Append tokens [B] to the cache at their logical positions; return the next logits [B,vocab]."""
        checks.lengths("tokens", tokens, len(cache.positions), 0, self.config.vocab_size - 1)
        layers = range(self.config.num_hidden_layers)
        groups = [group.parameters for index in layers for group in self.parameters.groups(index)]
        for one, parameters in zip(cache.caches, groups, strict=True):
            most = one.capacity if parameters.evicts_while_decoding else one.capacity - 1
            checks.lengths("cache.lengths", one.lengths, len(tokens), 0, most)
        hidden = self._embed(tokens, cache.positions)
        rest = iter(cache.caches)
        for index in layers:
            if index in cache.linear:
                hidden = self._linear_step(index, self._weights.layer(index), hidden, cache.linear[index])
                continue
            caches = [next(rest) for _ in self.parameters.groups(index)]
            hidden = self._decode_layer(index, self._weights.layer(index), hidden, cache.positions, caches)
        cache.positions = cache.positions + 1
        return self._logits(hidden)

    @torch.inference_mode()
    def extend(self, input_ids: Tensor, lengths: Tensor, cache: ReferenceCache, *, all_logits: bool = False) -> Tensor:
        """Append a turn's tokens [B,M], right padded, of lengths [B] at their logical positions, at once.

        Return the last tokens' logits [B,vocab], or with `all_logits` those of every token [B,M,vocab], zeros for
        padding. ValueError if the policy takes no turns, or if a cache that keeps everything has no room.
        """
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [B,M]")
        rows = checks.lengths("lengths", lengths, len(cache.positions), 1, input_ids.shape[1])
        last = self.parameters.max_sequence_len
        checks.lengths("cache.positions + lengths", cache.positions + lengths, len(rows), 1, last)
        starts = cache.positions.tolist()
        hidden = [self._embed(input_ids[b, :n], starts[b] + torch.arange(n)) for b, n in enumerate(rows)]
        rest = iter(cache.caches)
        for index in range(self.config.num_hidden_layers):
            weights, caches = self._weights.layer(index), [next(rest) for _ in self.parameters.groups(index)]
            if index in cache.linear:
                hidden = self._linear_layer(index, weights, hidden, cache.linear[index])
                continue
            projected = [
                self._project(index, weights, x, start + torch.arange(len(x)))
                for x, start in zip(hidden, starts, strict=True)
            ]
            outputs = self._caches.extend(index, projected, cache.positions, caches)
            hidden = [
                self._feed_forward(index, weights, x, self._after_attention(weights, x, output))
                for x, output in zip(hidden, outputs, strict=True)
            ]
        cache.positions = cache.positions + lengths
        if not all_logits:
            return self._logits(torch.stack([x[-1] for x in hidden]))
        found = [self._logits(x) for x in hidden]
        return torch.stack([torch.nn.functional.pad(x, (0, 0, 0, input_ids.shape[1] - len(x))) for x in found])

    def _prefill_layer(
        self, index: int, weights: Weights, hidden: list[Tensor], prompt_lengths: Tensor
    ) -> list[LayerCache]:
        """Pass every row's residual stream [n,hidden] through one layer, in place in the list; return its caches."""
        projected = []
        for b, x in enumerate(hidden):
            row, attended = self._attend_prompt(index, weights, x)
            hidden[b] = self._feed_forward(index, weights, x, attended)
            projected.append(row)
        budgets = None if self._prompt_budgets is None else [budgets[index] for budgets in self._prompt_budgets]
        return self._caches.store(index, projected, prompt_lengths, budgets)

    def _attend_prompt(self, index: int, weights: Weights, hidden: Tensor) -> tuple[Projected, Tensor]:
        """Return the projections of one prompt [n,hidden], and its residual stream after a layer's attention."""
        row = self._project(index, weights, hidden, torch.arange(len(hidden)))
        query, keys, values = (part.transpose(0, 1) for part in row[:3])
        window = self.config.attention(index).window
        output = causal_attention(query, keys, values, window=window, softmax=row.softmax).transpose(0, 1)
        return row, self._after_attention(weights, hidden, output)

    @torch.inference_mode()
    def layer_cosines(self, input_ids: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Return the cosine of the residual stream before and after each layer's attention: [B,S], [B] -> [L,B].

        It is averaged over a prompt's tokens (SqueezeAttention, arXiv 2404.04793)."""
        hidden = [self._embed(input_ids[b, :n], torch.arange(n)) for b, n in enumerate(prompt_lengths.tolist())]
        cosines = hidden[0].new_empty(self.config.num_hidden_layers, len(hidden))
        for index in range(self.config.num_hidden_layers):
            weights = self._weights.layer(index)
            for b, x in enumerate(hidden):
                _, attended = self._attend_prompt(index, weights, x)
                cosines[index, b] = torch.cosine_similarity(x, attended, dim=-1).mean()
                hidden[b] = self._feed_forward(index, weights, x, attended)
        return cosines

    def _set_prompt_budgets(self, input_ids: Tensor, prompt_lengths: Tensor) -> None:
        """If layer budgets are set per prompt, run the prompts once to measure them."""
        rule = self.parameters
        self._prompt_budgets, division = None, rule.division
        if division is None:
            return
        columns = self.layer_cosines(input_ids, prompt_lengths)[rule.skip_layers :].T.tolist()
        skipped = (division.budget,) * rule.skip_layers
        self._prompt_budgets = [
            skipped
            + squeeze(
                column, division.budget, share=division.share, minimum=division.least, maximum=division.room(n)
            ).budgets
            for column, n in zip(columns, prompt_lengths.tolist(), strict=True)
        ]

    def _decode_layer(
        self, index: int, weights: Weights, hidden: Tensor, positions: Tensor, caches: list[LayerCache]
    ) -> Tensor:
        """Pass the residual stream [B,hidden] of one token per row through one layer, updating its caches in place."""
        projected = self._project(index, weights, hidden, positions)
        output = self._caches.attend(index, projected, positions, caches)
        return self._feed_forward(index, weights, hidden, self._after_attention(weights, hidden, output))

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the residual stream before the first layer: tokens [N] at positions [N] -> [N,hidden]."""
        rows = self._weights.embed(tokens) * self._parts.embedding_scale
        return rows + self._weights.tensor(POSITIONS)[positions] if self._parts.learned_positions else rows

    def _project(self, index: int, weights: Weights, hidden: Tensor, positions: Tensor) -> Projected:
        """Project N tokens [N,hidden] at their positions to queries, keys and values of one layer."""
        config = self.config
        x = self._read(weights, "input_layernorm", hidden)
        query, keys, values = (self._product(weights, f"self_attn.{name}_proj", x) for name in ("q", "k", "v"))
        if config.qk_norm:
            query, keys = (
                self._norm_heads(weights[f"self_attn.{name}_norm.weight"], part)
                for name, part in (("q", query), ("k", keys))
            )
        query, keys, values = (part.reshape(len(x), -1, config.head_size) for part in (query, keys, values))
        factors = query_scale(config, index)
        if factors is not None:
            query = query * torch.from_numpy(factors).to(self.dtype)
        attention, softmax = config.attention(index), Softmax(self._parts.attention_softcap, weights.get(SINKS))
        if not attention.rotary:
            return Projected(query, keys, values, query, keys, softmax)
        rotary = self._rotary[attention.rotary_base]
        return Projected(rotary(query, positions), rotary(keys, positions), values, query, keys, softmax)

    def _norm_heads(self, weight: Tensor, x: Tensor) -> Tensor:
        """Apply the norm of queries or keys [N,heads*D]."""
        if self._parts.norms.heads == "together":
            return rms_norm(x, weight, self.config.norm_epsilon)
        heads, epsilon = x.reshape(len(x), -1, self.config.head_size), self.config.norm_epsilon
        if self._parts.norms.heads == "apart":
            return layer_norm(heads, weight.reshape(heads.shape[1:]), None, epsilon).flatten(1)
        return rms_norm(heads, weight, epsilon).flatten(1)

    def _empty_state(self, index: int, rows: int) -> LinearState | None:
        """Return the state of a linear layer before the first token; None for a layer with caches."""
        part = self.config.attention(index).linear
        return None if part is None else LinearState.empty(part, rows, self.dtype)

    def _linear_layer(self, index: int, weights: Weights, hidden: list[Tensor], state: LinearState) -> list[Tensor]:
        """Pass the residual streams [n,hidden] of all rows through a linear layer, which changes its state in place."""
        part, product = self.config.attention(index).linear, partial(self._product, weights)
        assert part is not None
        read = [self._read(weights, "input_layernorm", x) for x in hidden]
        updates = linear_attention(product, weights, part, read, state, self.config.norm_epsilon)
        return [
            self._feed_forward(index, weights, x, self._with_update(weights, x, update))
            for x, update in zip(hidden, updates, strict=True)
        ]

    def _linear_step(self, index: int, weights: Weights, hidden: Tensor, state: LinearState) -> Tensor:
        """Pass one token of each row [B,hidden] through a linear layer."""
        return torch.cat(self._linear_layer(index, weights, list(hidden[:, None]), state))

    def _after_attention(self, weights: Weights, hidden: Tensor, attention: Tensor) -> Tensor:
        """Add attention [N,H,D] to the residual stream [N,hidden] through its gate and the output projection."""
        flat = attention.flatten(1)
        if f"{ATTENTION_GATE}.weight" in weights:
            gate = self._product(weights, ATTENTION_GATE, self._read(weights, "input_layernorm", hidden))
            flat = flat * torch.sigmoid(gate)
        return self._with_update(weights, hidden, self._product(weights, "self_attn.o_proj", flat))

    def _with_update(self, weights: Weights, hidden: Tensor, update: Tensor) -> Tensor:
        """Add the result of attention, or of a linear layer, to the residual stream [N,hidden]."""
        return hidden + self._added(weights, ATTENTION_RESULT_NORM, update)

    def _feed_forward(self, index: int, weights: Weights, before: Tensor, hidden: Tensor) -> Tensor:
        """Apply a layer's feed-forward block to the residual stream [N,hidden]; attention has read `before`."""
        norms, experts = self._parts.norms, self.config.experts(index)
        name = "input_layernorm" if norms.place == "shared" else "post_attention_layernorm"
        x = self._read(weights, name, before if norms.side_by_side else hidden)
        if experts is not None:
            routes, count = self._routes, experts.chosen
            route = None if routes is None else lambda logits: routes(index, logits, count)
            update = mixed(weights, x, experts, self._parts.clamped_gate, route)
        else:
            update = mlp(partial(self._product, weights), x, self._parts.feed_forward)
        return hidden + self._added(weights, FEED_FORWARD_RESULT_NORM, update)

    def _read(self, weights: Weights, name: str, hidden: Tensor) -> Tensor:
        """Return the input of attention or feed-forward: a norm of the residual stream, or the stream itself."""
        return self._norm(weights, name, hidden) if self._parts.norms.reads_norm else hidden

    def _added(self, weights: Weights, name: str, update: Tensor) -> Tensor:
        """Return the update that a block adds to the stream: its result or the norm of it, times the model's scale."""
        normed = self._norm(weights, name, update) if self._parts.norms.adds_norm else update
        return normed * self._parts.residual_scale

    def _norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Apply the norm of that name to the last axis."""
        norms, epsilon = self._parts.norms, self.config.norm_epsilon
        weight = weights[f"{name}.weight"] if norms.weight else torch.ones(x.shape[-1], dtype=x.dtype)
        if norms.kind == "rms":
            return rms_norm(x, weight, epsilon)
        return layer_norm(x, weight, weights[f"{name}.bias"] if norms.bias else None, epsilon)

    def _product(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Multiply x [N,in] by a layer's matrix of that name."""
        return linear(weights, name, x)

    def _logits(self, hidden: Tensor) -> Tensor:
        norm = self._weights.outer("model.norm")
        logits = self._weights.logits(self._norm(norm, "model.norm", hidden)) * self._parts.logit_scale
        return Softmax(self._parts.logit_softcap).capped(logits)
