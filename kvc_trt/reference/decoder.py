"""A whole decoder that runs under any policy: prefill, compaction behind each layer's attention, cached decoding.

Prompts of a batch are computed one row at a time, so padding cannot leak; decoding takes the batch together. Positions
(what the rotary embedding sees) and cache lengths (what is stored) are separate: after eviction they differ. The last
prompt token belongs to prefill, so the first logits are those of exact attention; the released code's other choice, a
prompt one token shorter and a first sparse step, is not offered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvc_trt.reference import bounds, checks
from kvc_trt.reference.cache import LayerCache, ReferenceCache, Selection
from kvc_trt.reference.compaction import Compacted, compact
from kvc_trt.reference.dense import causal_attention, dense_attention
from kvc_trt.reference.layers import DecoderWeights, Rotary, Weights, linear, mlp, rms_norm
from kvc_trt.reference.recent import make_room
from kvc_trt.reference.squeeze import squeeze

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.policies.parameters import Group, PolicyParameters
    from kvc_trt.policies.registry import Method


class Projected(NamedTuple):
    """Queries [N,H,D], keys and values [N,G,D] of N tokens; the plain ones are not rotated."""

    query: Tensor
    keys: Tensor
    values: Tensor
    plain_query: Tensor
    plain_keys: Tensor


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
        self._prompt_budgets: list[tuple[int, ...]] | None = None

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, ReferenceCache]:
        """Read prompts [B,S], right padded, of lengths [B]; returns the last token's logits [B,vocab] and the cache."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [B,S]")
        longest = min(input_ids.shape[1], self.parameters.max_input_len)
        rows = checks.lengths("prompt_lengths", prompt_lengths, input_ids.shape[0], 1, longest)
        hidden = [self._weights.embed(input_ids[b, :n]) for b, n in enumerate(rows)]
        self._set_prompt_budgets(input_ids, prompt_lengths)
        caches = [
            cache
            for index in range(self.config.num_hidden_layers)
            for cache in self._prefill_layer(index, self._weights.layer(index), hidden, prompt_lengths)
        ]
        cache = ReferenceCache(caches, prompt_lengths.to(torch.int64).clone())
        return self._logits(torch.stack([x[-1] for x in hidden])), cache

    @torch.inference_mode()
    def decode(self, tokens: Tensor, cache: ReferenceCache) -> Tensor:
        """One step: tokens [B] enter the cache at their logical positions; returns the next logits [B,vocab]."""
        checks.lengths("tokens", tokens, len(cache.positions), 0, self.config.vocab_size - 1)
        layers = range(self.config.num_hidden_layers)
        groups = [group.parameters for index in layers for group in self.parameters.groups(index)]
        for one, parameters in zip(cache.caches, groups, strict=True):
            most = one.capacity if parameters.evicts_while_decoding else one.capacity - 1
            checks.lengths("cache.lengths", one.lengths, len(tokens), 0, most)
        hidden = self._weights.embed(tokens)
        rest = iter(cache.caches)
        for index in layers:
            caches = [next(rest) for _ in self.parameters.groups(index)]
            hidden = self._decode_layer(index, self._weights.layer(index), hidden, cache.positions, caches)
        cache.positions = cache.positions + 1
        return self._logits(hidden)

    def _prefill_layer(
        self, index: int, weights: Weights, hidden: list[Tensor], prompt_lengths: Tensor
    ) -> list[LayerCache]:
        """Every row's residual stream [n,hidden] through one layer, in place in the list; what the layer stores."""
        projected = []
        for b, x in enumerate(hidden):
            row, attended = self._attend_prompt(weights, x)
            hidden[b] = self._feed_forward(weights, attended)
            projected.append(row)
        budgets = None if self._prompt_budgets is None else [budgets[index] for budgets in self._prompt_budgets]
        return [self._compact(group, projected, prompt_lengths, budgets) for group in self.parameters.groups(index)]

    def _attend_prompt(self, weights: Weights, hidden: Tensor) -> tuple[Projected, Tensor]:
        """Projections of one prompt [n,hidden], and its residual stream after a layer's attention."""
        row = self._project(weights, hidden, torch.arange(len(hidden)))
        query, keys, values = (part.transpose(0, 1) for part in row[:3])
        output = causal_attention(query, keys, values).transpose(0, 1)
        return row, self._after_attention(weights, hidden, output)

    @torch.inference_mode()
    def layer_cosines(self, input_ids: Tensor, prompt_lengths: Tensor) -> Tensor:
        """How little each layer's attention turns the residual stream: the cosine between before and after, mean over
        a prompt's tokens; [B,S], [B] -> [L,B] (SqueezeAttention, arXiv 2404.04793)."""
        hidden = [self._weights.embed(input_ids[b, :n]) for b, n in enumerate(prompt_lengths.tolist())]
        cosines = hidden[0].new_empty(self.config.num_hidden_layers, len(hidden))
        for index in range(self.config.num_hidden_layers):
            weights = self._weights.layer(index)
            for b, x in enumerate(hidden):
                _, attended = self._attend_prompt(weights, x)
                cosines[index, b] = torch.cosine_similarity(x, attended, dim=-1).mean()
                hidden[b] = self._feed_forward(weights, attended)
        return cosines

    def _set_prompt_budgets(self, input_ids: Tensor, prompt_lengths: Tensor) -> None:
        """Where layer budgets are set for each prompt: read it once to see what they are."""
        self._prompt_budgets, share = None, self.parameters.squeeze_share
        if share is None:
            return
        rule = self.parameters
        columns = self.layer_cosines(input_ids, prompt_lengths)[rule.skip_layers :].T.tolist()
        skipped = (rule.prompt_budget,) * rule.skip_layers
        self._prompt_budgets = [
            skipped
            + squeeze(
                column, rule.prompt_budget, share=share, minimum=rule.window, maximum=min(rule.most_kept, n)
            ).budgets
            for column, n in zip(columns, prompt_lengths.tolist(), strict=True)
        ]

    def _decode_layer(
        self, index: int, weights: Weights, hidden: Tensor, positions: Tensor, caches: list[LayerCache]
    ) -> Tensor:
        """The residual stream [B,hidden] of one token per row through one layer, whose caches are advanced in place."""
        projected = self._project(weights, hidden, positions)
        output = torch.empty_like(projected.query)
        for group, cache in zip(self.parameters.groups(index), caches, strict=True):
            new, heads = self._of_group(group, projected)
            self._append(group, cache, new, positions)
            output[:, heads] = self._select(group, new, cache)
        return self._feed_forward(weights, self._after_attention(weights, hidden, output))

    def _of_group(self, group: Group, projected: Projected) -> tuple[Projected, list[int]]:
        """What belongs to one group's heads, and which query heads these are."""
        size = self.config.num_attention_heads // self.config.num_key_value_heads
        kv_heads = list(range(self.config.num_key_value_heads) if group.kv_heads is None else group.kv_heads)
        heads = [kv * size + head for kv in kv_heads for head in range(size)]
        query, keys, values, plain_query, plain_keys = projected
        mine = query[:, heads], keys[:, kv_heads], values[:, kv_heads], plain_query[:, heads], plain_keys[:, kv_heads]
        return Projected(*mine), heads

    def _append(self, group: Group, cache: LayerCache, new: Projected, positions: Tensor) -> None:
        """Store one token per row behind the entries of a cache, in place; a window drops its oldest first."""
        if group.parameters.decode_selection == "recent":
            make_room(cache, slots=group.parameters.capacity, sinks=group.parameters.sinks)
        stored = new.plain_keys if group.parameters.positions == "cache" else new.keys
        # A cache per query head repeats the keys of its group.
        keys, values = (x.repeat_interleave(cache.keys.shape[1] // x.shape[1], dim=1) for x in (stored, new.values))
        if cache.positions is not None:
            for row, slot in enumerate(cache.lengths.tolist()):
                cache.positions[row, :, slot] = positions[row]
        state = cache.keys, cache.values, cache.page_min, cache.page_max, cache.lengths
        bounds.append_in_place(*state, keys, values, page_size=group.parameters.page_size)
        cache.lengths = cache.lengths + 1

    def _project(self, weights: Weights, hidden: Tensor, positions: Tensor) -> Projected:
        """Queries, keys and values of N tokens [N,hidden] at their positions."""
        config = self.config
        x = rms_norm(hidden, weights["input_layernorm.weight"], config.norm_epsilon)
        query, keys, values = (
            linear(weights, f"self_attn.{name}_proj", x).reshape(len(x), -1, config.head_size)
            for name in ("q", "k", "v")
        )
        if config.qk_norm:
            query = rms_norm(query, weights["self_attn.q_norm.weight"], config.norm_epsilon)
            keys = rms_norm(keys, weights["self_attn.k_norm.weight"], config.norm_epsilon)
        return Projected(self._rotary(query, positions), self._rotary(keys, positions), values, query, keys)

    def _after_attention(self, weights: Weights, hidden: Tensor, attention: Tensor) -> Tensor:
        """The residual stream [N,hidden] with attention [N,H,D] added through the output projection."""
        return hidden + linear(weights, "self_attn.o_proj", attention.flatten(1))

    def _feed_forward(self, weights: Weights, hidden: Tensor) -> Tensor:
        """The rest of a layer on the residual stream [N,hidden]."""
        x = rms_norm(hidden, weights["post_attention_layernorm.weight"], self.config.norm_epsilon)
        return hidden + mlp(weights, x)

    def _logits(self, hidden: Tensor) -> Tensor:
        norm = self._weights.tensor("model.norm.weight")
        return self._weights.logits(rms_norm(hidden, norm, self.config.norm_epsilon))

    def _compact(
        self, group: Group, projected: list[Projected], prompt_lengths: Tensor, budgets: list[int] | None
    ) -> LayerCache:
        """Evict as the policy says (or to each prompt's own budget), and make room for the tokens to come."""
        parameters, longest = group.parameters, max(len(row.keys) for row in projected)
        rows = [self._of_group(group, row)[0] for row in projected]
        window = _stacked([row.query for row in rows], min(parameters.window, longest), last=True)
        keys = _stacked([row.plain_keys if parameters.positions == "cache" else row.keys for row in rows], longest)
        values = _stacked([row.values for row in rows], longest)
        kept: Compacted
        if self._is_exempt(group):
            kept = compact(window, keys, values, prompt_lengths, prompt_budget=longest, pool_kernel=1)
        elif budgets is None:
            kept = self.method.compact(window, keys, values, prompt_lengths, parameters)
        else:
            kept = self._compact_to(budgets, window, keys, values, prompt_lengths)
        lengths = kept.lengths.to(torch.int64)
        cache = LayerCache(
            _with_room(kept.keys, parameters.capacity), _with_room(kept.values, parameters.capacity), lengths
        )
        cache.indices, cache.positions = kept.indices, _with_room(kept.indices.long(), parameters.capacity)
        if kept.scores is not None:
            cache.scores = _with_room(kept.scores, parameters.capacity)
        if parameters.decode_selection in ("hybrid", "quest"):
            cache.page_min, cache.page_max = bounds.page_bounds(cache.keys, lengths, parameters.page_size)
        return cache

    def _compact_to(
        self, budgets: list[int], window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor
    ) -> Compacted:
        """The method's own compaction, each row to a budget of its own."""
        most, rows = self.parameters.most_kept, []
        for b, budget in enumerate(budgets):
            alone = replace(self.parameters, prompt_budget=budget)
            one = slice(b, b + 1)
            rows.append(self.method.compact(window[one], keys[one], values[one], prompt_lengths[one], alone))
        missing = [torch.nn.functional.pad(r.indices, (0, most - r.indices.shape[2]), value=-1) for r in rows]
        return Compacted(
            torch.cat([_with_room(r.keys, most) for r in rows]),
            torch.cat([_with_room(r.values, most) for r in rows]),
            torch.cat(missing),
            torch.cat([r.lengths for r in rows]),
        )

    def _is_exempt(self, group: Group) -> bool:
        """Whether a policy leaves these heads as they are (skipped layers, heads that keep everything)."""
        return group.parameters.policy != self.parameters.policy

    def _select(self, group: Group, new: Projected, cache: LayerCache) -> Tensor:
        """Attention of one step [B,heads,D] over what the policy reads; then drop what it drops."""
        if self._is_exempt(group):
            return dense_attention(new.query, cache.keys, cache.values, cache.lengths)
        query, seen = new.query, cache
        if group.parameters.positions == "cache":
            query = self._rotary(new.plain_query, cache.lengths - 1)
            seen = replace(cache, keys=self._rotated_by_slot(cache.keys))
        step: Selection = self.method.select(query, seen, group.parameters)
        cache.selected = step.selected
        if step.scores is not None:
            cache.scores = step.scores
        for row, kept in enumerate(step.kept or ()):
            cache.keep(row, kept)
        return step.output

    def _rotated_by_slot(self, keys: Tensor) -> Tensor:
        """Keys [B,G,C,D] rotated as if slot i were position i."""
        batch, heads, slots, size = keys.shape
        by_slot = keys.permute(2, 0, 1, 3).reshape(slots, batch * heads, size)
        return self._rotary(by_slot, torch.arange(slots)).reshape(slots, batch, heads, size).permute(1, 2, 0, 3)


def _stacked(rows: list[Tensor], slots: int, *, last: bool = False) -> Tensor:
    """Rows [n,heads,D] of unequal length as [B,heads,slots,D]: their first tokens from the front, or their last ones
    up to the end; zeros elsewhere."""
    stacked = rows[0].new_zeros(len(rows), rows[0].shape[1], slots, rows[0].shape[2])
    for target, row in zip(stacked, rows, strict=True):
        count = min(len(row), slots)
        if last:
            target[:, slots - count :] = row[-count:].transpose(0, 1)
        else:
            target[:, :count] = row[:count].transpose(0, 1)
    return stacked


def _with_room(stored: Tensor, slots: int) -> Tensor:
    """`stored` [B,G,n,...] in a table of `slots` slots, zeros behind it."""
    room = stored.new_zeros(*stored.shape[:2], slots, *stored.shape[3:])
    room[:, :, : stored.shape[2]] = stored
    return room
