"""One model under one policy in PyTorch, batched: the layers of the reference around `torch.ops.kvc`.

A batch is [T, width] throughout, with T = batch * sequence in prefill and T = batch in a step. Prefill works layer by
layer: a layer's keys and values are compacted before the next layer computes its own, so only one full cache is in
memory; projections, attention and feed-forward run over blocks of tokens. Between two of these pieces a prefill can
wait (`slices.py`); a prefill that does not wait runs the same pieces. A step has fixed shapes, never waits for the
device and updates its state in place, so that it can be captured in a CUDA graph. Under a policy without kernels for
some part, the caches run by nodes (`nodes/cache_operations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvc_trt.backends.torch.decoder_options import DecoderOptions
from kvc_trt.backends.torch.memory import LINEAR_BLOCK
from kvc_trt.backends.torch.model.linear_layers import LinearRows, linear_inputs, take_token, take_tokens
from kvc_trt.backends.torch.model.prefetch import weight_prefetch
from kvc_trt.backends.torch.model.projections import Projections, finished
from kvc_trt.backends.torch.model.prompt_attention import (
    last_queries,
    prefill_attention,
    queries_at_once,
    sliding_attention,
)
from kvc_trt.backends.torch.model.shaped_attention import shaped_attention
from kvc_trt.backends.torch.model.turn import take_turns
from kvc_trt.backends.torch.nodes.caches import State, runs_by_nodes
from kvc_trt.backends.torch.whole_prompts import store_whole
from kvc_trt.graph.state import cache_sites, uses_pages
from kvc_trt.kernels.ops import numbers_of, operation
from kvc_trt.kernels.reference_ops import rotated_token
from kvc_trt.kernels.rotated import ROTATED_DENSE_ATTENTION, ROTATED_HYBRID_ATTENTION
from kvc_trt.kernels.stored_parts import names_of
from kvc_trt.methods.base.graph_context import of_token
from kvc_trt.models.weights import SINKS
from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.linear.delta_rule import CHUNK
from kvc_trt.operators.linear.tokens import STATE as LINEAR_STATE
from kvc_trt.reference.softmax import Softmax

if TYPE_CHECKING:
    from kvc_trt.backends.torch.model.weights import TorchWeights
    from kvc_trt.backends.torch.nodes.caches import Block
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.operators.schema import Operator

AFTER_ATTENTION = ("self_attn.o_proj.weight", "mlp.gate_up_proj.weight")
"""The matrices to read ahead while attention runs, because the step reads them next; experts are not chosen yet."""
OBSERVABLE = ("q_window", "keys", "values", "indices", "query", "key", "value", "attended", "selected")


class PromptResult(NamedTuple):
    """The result of a prefill."""

    logits: Tensor
    """float32 [B,vocab]: the logits of each row's last token."""
    state: dict[str, Tensor]
    cache_lengths: Tensor
    """int64 [caches,B]: the number of tokens stored per cache and row."""


class TorchDecoder(Projections):
    """The computation around the kernels, in the type and on the device of the weights; caches have `cache_dtype`."""

    def __init__(
        self, config: ModelConfig, parameters: PolicyParameters, weights: TorchWeights, options: DecoderOptions
    ) -> None:
        dense_attention, cache_dtype = options.dense_attention, options.cache_dtype
        if dense_attention is not None and parameters.cache_format.keys is not None:
            raise ValueError(f"dense_attention reads exact caches; expected kv_cache auto, found {parameters.kv_cache}")
        super().__init__(config, weights, parameters.max_sequence_len, options.elementwise, options.block)
        self.parameters, self.cache_dtype = parameters, cache_dtype
        self.exposed: dict[str, Tensor] = {}
        self._expose = frozenset(options.expose)
        self._turns = options.turns
        self._dense_attention = dense_attention
        keys, values = names_of(parameters.cache_format)
        self._parts = [*keys, *values]
        """The kinds of state that hold keys and values."""
        self._hybrid_numbers = numbers_of(HYBRID_ATTENTION, parameters)
        self._budgets: Tensor | None = None
        self.on_gpu = weights.embedding.device.type == "cuda"
        sites = cache_sites(config, parameters)
        self.caches = len(sites)
        self._cache_of = {site.layer: site.cache for site in sites}
        """The row of `cache_lengths` of each layer, if kernels run, under which each layer has one cache."""
        self._ahead = weight_prefetch(weights.embedding.device)
        self._by_nodes = runs_by_nodes(self, options)
        # The kernels rotate what a step projects, where nothing stands between the two: no norm, type or other kernel.
        plain = (
            weights.embedding.dtype == cache_dtype
            and not config.qk_norm
            and not any(scale is not None for scale in self._query_scales)
        )
        self._rotates = plain and dense_attention is None and self._by_nodes.steps is None

    @property
    def sinks(self) -> dict[str, Tensor]:
        """The sinks [H] of every layer, in the cache's type, by their names in graphs; empty if there are none."""
        layers = ((f"model.layers.{layer}.{SINKS}", own) for layer, own in enumerate(self._weights.layers))
        return {name: own[SINKS].to(self.cache_dtype) for name, own in layers if SINKS in own}

    @property
    def steps_by_nodes(self) -> bool:
        """True if steps run node by node, which makes the host wait for the device."""
        return self._by_nodes.steps is not None

    def prefill(self, input_ids: Tensor, prompt_lengths: Tensor) -> PromptResult:
        """Run prompts [B,S], right padded, of lengths [B], compacting each layer's cache after its attention."""
        return finished(self.prefill_in_pieces(input_ids, prompt_lengths))

    def pieces_of_layers(self, rows: int, length: int) -> list[int]:
        """Return the number of pieces of each layer for `rows` prompts of `length` tokens, including padding."""
        length = self._padded(length)
        full = 2 * len(list(self._blocks(rows * length))) + len(self._query_blocks(length)) + 1
        linear = len(self._token_blocks(rows, length))
        attentions = map(self.config.attention, range(self.config.num_hidden_layers))
        return [full if attention.linear is None else linear for attention in attentions]

    @torch.inference_mode()
    def prefill_in_pieces(self, input_ids: Tensor, prompt_lengths: Tensor) -> Generator[None, None, PromptResult]:
        """Like `prefill`, one piece per `next`: a block of projections, attention or feed-forward, or a compaction."""
        input_ids = functional.pad(input_ids, (0, self._padded(input_ids.shape[1]) - input_ids.shape[1]))
        batch, length = input_ids.shape
        state: dict[str, Tensor] = {}
        lengths: list[Tensor] = []
        places = torch.arange(batch * length, device=input_ids.device) % length
        places = places.clamp(max=self._positions - 1)  # padding may extend past the tables
        hidden = self._embed(input_ids.flatten(), places)
        for layer in range(self.config.num_hidden_layers):
            if self.config.attention(layer).linear is not None:
                state |= yield from self._prefill_linear_layer(layer, hidden, prompt_lengths)
                continue
            kept, stored = yield from self._prefill_layer(layer, hidden, places, prompt_lengths)
            state.update(kept)
            lengths += stored
        last = torch.arange(batch, device=hidden.device) * length + prompt_lengths - 1
        return PromptResult(self._logits(hidden.index_select(0, last)), state, torch.stack(lengths))

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, cache_lengths: Tensor, state: State) -> Tensor:
        """Run one step, updating `state` in place: tokens, positions [B], cache_lengths [caches,B] -> [B,vocab]."""
        return self._steps(tokens, positions, cache_lengths, state, 1)

    @torch.inference_mode()
    def check_draft(self, tokens: Tensor, positions: Tensor, cache_lengths: Tensor, state: State) -> Tensor:
        """Run n steps in one pass: `tokens` [n,B], the first ones at `positions` [B] -> logits [n,B,vocab]."""
        places = positions + torch.arange(len(tokens), device=positions.device)[:, None]
        found = self._steps(tokens.flatten(), places.flatten(), cache_lengths, state, len(tokens))
        return found.view(*tokens.shape, -1)

    def _steps(self, tokens: Tensor, positions: Tensor, cache_lengths: Tensor, state: State, count: int) -> Tensor:
        """Run `count` steps of known tokens [count*B] at once, except for attention, which runs step by step."""
        layers, numbers = self._weights.layers, range(self.config.num_hidden_layers)
        kinds = [(attention.rotary, attention.rotary_base) for attention in map(self.config.attention, numbers)]
        angles = {
            kind: self._angles(layer, positions) for kind, layer in dict(zip(kinds, numbers, strict=True)).items()
        }
        # Below 0 a row is inactive, and stays that.
        stored = [
            cache_lengths,
            *(torch.where(cache_lengths < 0, -1, cache_lengths + step) for step in range(1, count)),
        ]
        hidden = self._embed(tokens, positions)
        x = self._read(0, "input_layernorm", hidden)
        for layer, weights in enumerate(layers):
            if self.config.attention(layer).linear is not None:
                hidden, x = self._linear_step(layer, hidden, x, cache_lengths, state)
                continue
            cos, sin = angles[kinds[layer]]
            made = (self._join(layer, x), cos, sin) if self._rotates else self._split(layer, x, cos, sin)
            if self._ahead is not None:
                self._ahead.start(*(weights[name] for name in AFTER_ATTENTION if name in weights))
            if self._by_nodes.steps is not None:
                outputs = self._by_nodes.steps.attend(layer, x, made, positions, cache_lengths, state, count)
            else:
                self._see_stored(layer, made, count)
                attend = self._attend_rotated if self._rotates else self._attend
                outputs = [
                    attend(layer, own, stored[step][self._cache_of[layer]], state)
                    for step, own in enumerate(zip(*(part.chunk(count) for part in made), strict=True))
                ]
            attended = outputs[0] if count == 1 else torch.cat(outputs)
            hidden, x = self._to_next(layer, hidden, x, attended.to(x.dtype).flatten(1))
        logits = self._project_to_vocabulary(x)
        if self._ahead is not None:
            self._ahead.end()
        return logits

    @torch.inference_mode()
    def extend(
        self, input_ids: Tensor, positions: Tensor, lengths: Sequence[int], cache_lengths: Sequence[Sequence[int]],
        state: State, *, all_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Let rows take a turn, updating `state` in place: new tokens [B,M], right padded, of `lengths` [B].

        positions [B] are those of the first new tokens, cache_lengths [caches,B] the entries before the turn. Returns
        the last tokens' logits [B,vocab], or with `all_logits` those of every token [B,M,vocab], and the entries after
        it, int64 [caches,B] on the CPU.
        """
        batch, block = input_ids.shape
        places = positions[:, None] + torch.arange(block, device=positions.device)
        places = places.flatten().clamp(max=self._positions - 1)  # padding may extend past the tables
        hidden = self._embed(input_ids.flatten(), places)
        stored: list[Tensor] = []
        for layer in range(self.config.num_hidden_layers):
            if self.config.attention(layer).linear is not None:
                own = self._linear_rows(layer, state)
                finished(self._linear_in_pieces(layer, hidden, own, torch.tensor(lengths, device=hidden.device)))
                continue
            made, given = self._project(layer, hidden, batch, places), (lengths, positions, cache_lengths, state)
            if self._by_nodes.prompts is not None:
                attended, after = self._by_nodes.prompts.take_turn(layer, (hidden, made), *given)
            else:
                rule = self.parameters.groups(layer)[0].parameters
                before = cache_lengths[self._cache_of[layer]]
                attended, after = take_turns(layer, made, lengths, positions, before, state, rule, self.cache_dtype)
                keys, values = (part.transpose(1, 2).to(self.cache_dtype) for part in made[1:])
                self._see(layer, keys=keys, values=values)
            stored += after
            self._finish(layer, hidden, attended.transpose(1, 2).reshape(len(hidden), -1))
        if all_logits:
            return self._logits(hidden).reshape(batch, block, -1), torch.stack(stored).cpu()
        last = torch.arange(batch, device=hidden.device) * block + torch.tensor(lengths, device=hidden.device) - 1
        return self._logits(hidden.index_select(0, last)), torch.stack(stored).cpu()

    def _padded(self, length: int) -> int:
        """Return the length to which prompts of `length` tokens are padded."""
        return length + (-length % PROMPT_BLOCK if self._by_nodes.pads else 0)

    def _token_blocks(self, rows: int, length: int) -> list[slice]:
        """Divide the tokens of `rows` prompts of `length` tokens into the blocks that a linear layer processes."""
        together = max(1, min(self._block, LINEAR_BLOCK) // (rows * CHUNK)) * CHUNK
        return [slice(first, min(first + together, length)) for first in range(0, length, together)]

    def _query_blocks(self, length: int) -> list[slice]:
        """Divide the queries of prompts of `length` tokens into the blocks that attend together."""
        at_once = queries_at_once(self._weights.embedding, self._block)
        return [slice(first, min(first + at_once, length)) for first in range(0, length, at_once)]

    def _attention_in_pieces(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> Generator[None, None, Tensor]:
        """Attend over whole prompts: [B,H,S,D], [B,G,S,D], [B,G,S,D] -> [B,S,H,D]."""
        rule, blocks = self.parameters.groups(layer)[0].parameters, self._query_blocks(query.shape[2])
        softmax, window = self._softmax(layer), rule.capacity if rule.slides else None
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = (
            prefill_attention if window is None else partial(sliding_attention, window=window)
        )
        if not softmax.plain:
            attend = partial(shaped_attention, softmax=softmax, window=window)
        if len(blocks) == 1:
            whole = attend(query, keys, values).transpose(1, 2)
            yield
            return whole
        attended = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for rows in blocks:
            end = rows.stop
            block = attend(query[:, :, rows], keys[:, :, :end], values[:, :, :end])
            attended[:, rows] = block.transpose(1, 2)
            yield
        return attended

    def _softmax(self, layer: int) -> Softmax:
        """Return the softmax of a layer's attention."""
        return Softmax(self.config.description.attention_softcap, self._weights.layers[layer].get(SINKS))

    def _prefill_layer(
        self, layer: int, hidden: Tensor, places: Tensor, prompt_lengths: Tensor
    ) -> Generator[None, None, tuple[dict[str, Tensor], list[Tensor]]]:
        """Pass the residual stream [T,hidden] of tokens at `places` [T] through one layer, in place.

        Returns its stored tensors and lengths.
        """
        batch = len(prompt_lengths)
        made = yield from self._project_in_pieces(layer, hidden, batch, places)
        query, keys, values = (part.transpose(1, 2) for part in made)
        attended = yield from self._attention_in_pieces(layer, query, keys, values)
        if self._by_nodes.prompts is not None:
            stored = self._store_by_nodes(layer, (hidden, made), prompt_lengths)
            del made, query
        else:
            del made
            keys, values = keys.to(self.cache_dtype), values.to(self.cache_dtype)
            if self.parameters.is_compressed(layer):
                q_window = last_queries(query, prompt_lengths, self.parameters.window).to(self.cache_dtype)
                del query
                kept, lengths = self._compact(layer, q_window, keys, values, prompt_lengths)
                stored = kept, [lengths]
            else:
                del query
                self._see(layer, keys=keys, values=values)
                stored = self._store_whole(layer, keys, values, prompt_lengths), [prompt_lengths]
        del keys, values  # free memory for the feed-forward block
        yield
        yield from self._finish_in_pieces(layer, hidden, attended.reshape(len(hidden), -1))
        return stored

    def _prefill_linear_layer(
        self, layer: int, hidden: Tensor, prompt_lengths: Tensor
    ) -> Generator[None, None, dict[str, Tensor]]:
        """Pass the residual stream [T,hidden] through a linear layer, in place; return its state."""
        part = self.config.attention(layer).linear
        assert part is not None
        state = LinearRows.empty(part, len(prompt_lengths), hidden.new_empty(0, dtype=self.cache_dtype))
        yield from self._linear_in_pieces(layer, hidden, state, prompt_lengths)
        return dict(zip(_linear_names(layer), state, strict=True))

    def _linear_in_pieces(
        self, layer: int, hidden: Tensor, state: LinearRows, lengths: Tensor
    ) -> Generator[None, None, None]:
        """Pass `lengths` [B] tokens of the stream [T,hidden] through a linear layer block by block, in place."""
        part, by_row = self.config.attention(layer).linear, hidden.view(len(lengths), -1, hidden.shape[1])
        assert part is not None
        for block in self._token_blocks(*by_row.shape[:2]):
            rows = by_row[:, block].flatten(0, 1)
            x, weights = self._read(layer, "input_layernorm", rows), self._weights.layers[layer]
            inputs = linear_inputs(weights, part, x.view(len(lengths), -1, x.shape[1]))
            read = take_tokens(weights, part, inputs, state, (lengths - block.start).clamp(0, block.stop - block.start))
            before, update = self._before_next(layer, rows, x, read.flatten(0, 1))
            by_row[:, block] = (before + update).view(len(lengths), -1, x.shape[1])
            yield

    def _linear_step(
        self, layer: int, hidden: Tensor, x: Tensor, cache_lengths: Tensor, state: State
    ) -> tuple[Tensor, Tensor]:
        """Pass one token of each row through a linear layer; return stream and next layer's input, each [B,hidden]."""
        part, weights = self.config.attention(layer).linear, self._weights.layers[layer]
        assert part is not None
        if len(x) != cache_lengths.shape[1]:
            raise ValueError("a linear layer takes in each token for good; expected one token of each row")
        inputs, rows = linear_inputs(weights, part, x), self._linear_rows(layer, state)
        read = take_token(weights, part, inputs, rows, cache_lengths[0] >= 0)
        return self._to_next(layer, hidden, x, read)

    def _linear_rows(self, layer: int, state: State) -> LinearRows:
        return LinearRows(*(state[name] for name in _linear_names(layer)))

    def _to_next(self, layer: int, hidden: Tensor, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream after a layer, given its attention [N,H*D], and the input of the next layer."""
        hidden, update = self._before_next(layer, hidden, x, attended)
        following = layer + 1 if layer + 1 < self.config.num_hidden_layers else None
        return self._add(following, "input_layernorm", hidden, update)

    def _store_by_nodes(
        self, layer: int, block: Block, prompt_lengths: Tensor
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        assert self._by_nodes.prompts is not None
        return self._by_nodes.prompts.store(layer, block, prompt_lengths)

    def _attend(self, layer: int, made: tuple[Tensor, Tensor, Tensor], cache_lengths: Tensor, state: State) -> Tensor:
        """Store one token per row, of query [B,H,D], key and value [B,G,D], and attend [B,H,D]."""
        query, keys, values = (x.to(self.cache_dtype) for x in made)
        inputs = query, keys, values, *self._caches(layer, state)
        attended: Tensor
        if not uses_pages(self.parameters, layer):
            attend: Any = self._dense_attention or self._operation(DENSE_ATTENTION)
            attended = attend(*inputs, cache_lengths)
            return attended
        paged = *inputs, state[f"bounds.{layer}"], cache_lengths
        if f"selected.{layer}" in self._expose:
            attended, selected = self._operation(HYBRID_ATTENTION)(*paged, **self._hybrid_numbers)
            self._see(layer, selected=selected)
        else:
            attended = self._operation(HYBRID_ATTENTION, "selected")(*paged, **self._hybrid_numbers)
        self._see(layer, query=query, attended=attended)
        return attended

    def _attend_rotated(
        self, layer: int, made: tuple[Tensor, Tensor, Tensor], cache_lengths: Tensor, state: State
    ) -> Tensor:
        """Store one token per row and attend [B,H,D] like `_attend`, but let kernels apply the rotary embedding.

        `made` are the joined projections [B,(H+2G)*D], and cosines and sines [B,D/2].
        """
        joined, *angles = made
        heads, kv_heads = self._heads
        inputs = joined.view(len(joined), heads + 2 * kv_heads, -1), *angles, *self._caches(layer, state)
        attended: Tensor
        if not uses_pages(self.parameters, layer):
            attended, _ = self._operation(ROTATED_DENSE_ATTENTION)(*inputs, cache_lengths, heads=heads)
            return attended
        paged, numbers = (*inputs, state[f"bounds.{layer}"], cache_lengths), {"heads": heads, **self._hybrid_numbers}
        if f"selected.{layer}" in self._expose:
            attended, selected, query = self._operation(ROTATED_HYBRID_ATTENTION)(*paged, **numbers)
            self._see(layer, selected=selected)
        else:
            attended, query = self._operation(ROTATED_HYBRID_ATTENTION, "selected")(*paged, **numbers)
        self._see(layer, query=query, attended=attended)
        return attended

    def _compact(
        self, layer: int, q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        rule, paged = self.parameters.groups(layer)[0].parameters, uses_pages(self.parameters, layer)
        numbers = numbers_of(COMPACT, rule)
        if not paged:
            numbers["page_size"] = rule.capacity  # one page, since the bounds are not used
        own = {} if not rule.by_length else self._numbers_by_length(rule, prompt_lengths)
        rows = q_window, keys, values, prompt_lengths
        *parts, bounds, lengths, indices = self._operation(COMPACT)(*rows, **numbers, **own)
        self._see(layer, q_window=q_window, keys=keys, values=values, indices=indices)
        kept = self._named(layer, parts)
        if self._turns:
            kept[f"slot_positions.{layer}"] = indices
        return kept | ({f"bounds.{layer}": bounds} if paged else {}), lengths

    def _numbers_by_length(self, rule: PolicyParameters, prompt_lengths: Tensor) -> dict[str, Tensor]:
        """Return each prompt's budget and pool kernel, looked up on the device by its length [B]."""
        if self._budgets is None:
            self._budgets = torch.from_numpy(rule.budgets).to(prompt_lengths.device)
        kernels = torch.where(prompt_lengths < rule.long_prompt, rule.short_pool_kernel, rule.pool_kernel)
        budgets = self._budgets[prompt_lengths.clamp(max=rule.max_input_len)]
        return {"prompt_budgets": budgets, "pool_kernels": kernels}

    def _store_whole(self, layer: int, keys: Tensor, values: Tensor, prompt_lengths: Tensor) -> dict[str, Tensor]:
        capacity, form = self.parameters.layer_capacity(layer), self.parameters.cache_format
        return self._named(layer, store_whole(keys, values, prompt_lengths, capacity, form))

    def _operation(self, operator: Operator, *without: str) -> Any:
        """Return the operator of `torch.ops.kvc` over caches in the policy's format."""
        return operation(operator, self.parameters.cache_format, without)

    def _caches(self, layer: int, state: State) -> list[Tensor]:
        return [state[f"{name}.{layer}"] for name in self._parts]

    def _named(self, layer: int, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the parts of a layer's keys and values by the names of the state."""
        return dict(zip((f"{name}.{layer}" for name in self._parts), parts, strict=True))

    def _see_stored(self, layer: int, made: tuple[Tensor, Tensor, Tensor], count: int) -> None:
        """Expose the exact keys and values that `count` steps store for tokens [count*B]; kernels may rotate them.

        Their names for each token are those of a draft graph."""
        if not self._expose.intersection((f"key.{layer}", f"value.{layer}")):
            return
        if self._rotates:
            (joined, cosines, sines), (heads, kv_heads) = made, self._heads
            made = rotated_token(joined.view(len(joined), heads + 2 * kv_heads, -1), cosines, sines, heads)
        for name, part in zip(("key", "value"), made[1:], strict=True):
            for step, own in enumerate(part.to(self.cache_dtype).chunk(count)):
                self.exposed[of_token(f"{name}.{layer}", step, count)] = own.clone()

    def _see(self, layer: int, **values: Tensor) -> None:
        named = {f"{name}.{layer}": value for name, value in values.items()}
        self.exposed.update((name, value.clone()) for name, value in named.items() if name in self._expose)


def _linear_names(layer: int) -> list[str]:
    """Return the names of a linear layer's state, in the order of `LinearRows`."""
    return [f"{one.name}.{layer}" for one in LINEAR_STATE]
