"""The caches of a decoder's layers under a policy: compact a prompt, append a token, read the tokens that a step
selects.

A layer's KV heads may form several groups, each with its own cache and rule (`Rule.groups`).

A prompt's own attention and the votes for its kept tokens read exact keys and values. Kept tokens are stored in the
rule's format, and everything that reads a cache afterwards reads the stored values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.models.config import ModelConfig
from kvc_trt.reference import bounds
from kvc_trt.reference.cache import LayerCache, Selection
from kvc_trt.reference.compaction import Compacted, compact
from kvc_trt.reference.dense import dense_attention
from kvc_trt.reference.layers import Rotary
from kvc_trt.reference.methods.recent import keep_recent, make_room
from kvc_trt.reference.model.rules import HeadGroup, Method, PromptQueries, Rule
from kvc_trt.reference.softmax import PLAIN, Softmax
from kvc_trt.reference.stored import read_back
from kvc_trt.reference.turn import Turn, append_block, extend_attention, join


class Projected(NamedTuple):
    """Queries [N,H,D], keys and values [N,G,D] of N tokens; those named plain are not rotated."""

    query: Tensor
    keys: Tensor
    values: Tensor
    plain_query: Tensor
    plain_keys: Tensor
    softmax: Softmax = PLAIN
    """The softmax that the layer's attention applies to its logits."""


class Tokens(NamedTuple):
    """The tokens whose keys and values a cache stores."""

    layer: int
    group: int
    """The number of the cache among those of its layer."""
    rule: Rule
    positions: Tensor
    """int64 [B,n] or [B,heads,n]: their logical positions; below 0 past a row's end."""


ReadBack: TypeAlias = "Callable[[Tokens, Tensor, Tensor], tuple[Tensor, Tensor]]"
"""Returns the exact keys and values [B,heads,n,D] of some tokens as a cache reads them back."""


class LayerCaches:
    """Creates and updates the caches of a model's layers under one policy; the caller holds them."""

    def __init__(self, config: ModelConfig, parameters: Rule, method: Method, rotary: Rotary) -> None:
        self.method = method
        self.read_back: ReadBack = as_stored
        """It can be replaced."""
        self._config, self._parameters, self._rotary = config, parameters, rotary

    def store(
        self, layer: int, projected: list[Projected], prompt_lengths: Tensor, budgets: list[int] | None
    ) -> list[LayerCache]:
        """Compact prompts, one per entry of `projected`, to the caches of a layer; `budgets` are budgets per prompt."""
        groups = enumerate(self._parameters.groups(layer))
        return [self._compact((layer, number), group, projected, prompt_lengths, budgets) for number, group in groups]

    def attend(self, layer: int, projected: Projected, positions: Tensor, caches: list[LayerCache]) -> Tensor:
        """Append one token per row to a layer's caches and attend to the tokens that the policy reads; returns
        [B,H,D]."""
        output = torch.empty_like(projected.query)
        for number, (group, cache) in enumerate(zip(self._parameters.groups(layer), caches, strict=True)):
            new, heads = self._of_group(group, projected)
            self._append((layer, number), group, cache, new, positions)
            output[:, heads] = self._select(layer, group, new, cache)
        return output

    def extend(
        self, layer: int, projected: list[Projected], positions: Tensor, caches: list[LayerCache]
    ) -> list[Tensor]:
        """Attend from a turn's tokens, one entry of `projected` per row, and store them; `positions` [B] of the first.

        Returns [n,H,D] per row. The caches are changed in place."""
        outputs = [torch.empty_like(row.query) for row in projected]
        for number, (group, cache) in enumerate(zip(self._parameters.groups(layer), caches, strict=True)):
            rows = [self._of_group(group, row) for row in projected]
            attended = self._take_turn((layer, number), group, cache, [row for row, _ in rows], positions)
            for output, found, (row, heads) in zip(outputs, attended, rows, strict=True):
                output[:, heads] = found[:, : len(row.query)].transpose(0, 1)
        return outputs

    def _take_turn(
        self, where: tuple[int, int], group: HeadGroup, cache: LayerCache, rows: list[Projected], positions: Tensor
    ) -> Tensor:
        """Attend from a turn's tokens of one group, [B,heads,M,D], and put them into its cache."""
        rule, longest = group.parameters, max(len(row.keys) for row in rows)
        if rule.no_turn is not None:
            raise ValueError(f"policy {rule.policy} takes no turns: {rule.no_turn}")
        new_lengths = torch.tensor([len(row.keys) for row in rows])
        shared = cache.keys.shape[1] // rows[0].keys.shape[1]
        keys, values = (
            _stacked(parts, longest).repeat_interleave(shared, dim=1)
            for parts in ([row.keys for row in rows], [row.values for row in rows])
        )
        written = (torch.arange(longest) + positions[:, None]).masked_fill(
            torch.arange(longest) >= new_lengths[:, None], -1
        )
        k_new, v_new = self.read_back(Tokens(*where, rule, written), keys, values)
        source = cache if cache.whole is None else cache.whole
        joined = join(source.keys, source.values, source.lengths, k_new, v_new, new_lengths)
        queries = _stacked([row.query for row in rows], longest)
        window = rule.capacity if rule.slides else None
        softmax, stored = rows[0].softmax, (source.lengths, new_lengths)
        attended = extend_attention(queries, joined[0], joined[1], *stored, window=window, softmax=softmax)
        assert source.positions is not None
        places = torch.cat([source.positions, source.positions.new_zeros(*joined[0].shape[:2], longest)], dim=2)
        for b, (m, n) in enumerate(zip(source.lengths.tolist(), new_lengths.tolist(), strict=True)):
            places[b, :, m : m + n] = positions[b] + torch.arange(n)
        if source is cache.whole or not rule.evicts_on_turns:
            state = source.keys, source.values, source.page_min, source.page_max, source.lengths
            append_block(*state, k_new, v_new, new_lengths, page_size=rule.page_size, fp8=rule.fp8_bounds)
            source.lengths, source.positions = joined[2], places[:, :, : source.capacity]
        if not rule.evicts_on_turns:
            return attended
        turn = Turn(
            *joined, new_lengths, positions + new_lengths,
            _stacked([row.query for row in rows], longest, last=True),
            lambda: _stacked([row.plain_query for row in rows], longest), self._rotary_tables(where[0]), places,
            None if cache.scores is None else _with_room(cache.scores, joined[0].shape[2]), softmax,
        )  # fmt: skip
        kept = self._compact_turn(turn, rule, cache.budgets)
        held = places.gather(2, kept.indices.clamp(min=0).long()).masked_fill(kept.indices < 0, -1)
        self._fill(cache, kept._replace(indices=held.int()), rule)
        return attended

    def _of_group(self, group: HeadGroup, projected: Projected) -> tuple[Projected, list[int]]:
        """Return the projections of one group's heads, and the indices of its query heads."""
        size = self._config.num_attention_heads // self._config.num_key_value_heads
        kv_heads = list(range(self._config.num_key_value_heads) if group.kv_heads is None else group.kv_heads)
        heads = [kv * size + head for kv in kv_heads for head in range(size)]
        query, keys, values, plain_query, plain_keys, softmax = projected
        mine = query[:, heads], keys[:, kv_heads], values[:, kv_heads], plain_query[:, heads], plain_keys[:, kv_heads]
        return Projected(*mine, softmax.of_heads(heads)), heads

    def _append(
        self, where: tuple[int, int], group: HeadGroup, cache: LayerCache, new: Projected, positions: Tensor
    ) -> None:
        """Append one token per row to a cache in place; a sliding window drops its oldest entry first."""
        if group.parameters.drops_before_append:
            rules = self._rules_of_rows(group.parameters, cache)
            make_room(cache, slots=[rule.capacity for rule in rules], sinks=group.parameters.sinks)
        stored = new.plain_keys if group.parameters.positions == "cache" else new.keys
        # With one cache per query head, each repeats the key of its group.
        exact = (
            x.repeat_interleave(cache.keys.shape[1] // x.shape[1], dim=1)[:, :, None] for x in (stored, new.values)
        )
        tokens = Tokens(*where, group.parameters, positions[:, None])
        keys, values = (x[:, :, 0] for x in self.read_back(tokens, *exact))
        if cache.positions is not None:
            for row, slot in enumerate(cache.lengths.tolist()):
                cache.positions[row, :, slot] = positions[row]
        tables, rule = (cache.keys, cache.values, cache.page_min, cache.page_max), group.parameters
        bounds.append_in_place(tables, cache.lengths, keys, values, page_size=rule.page_size, fp8=rule.fp8_bounds)
        cache.lengths = cache.lengths + 1
        if cache.whole is not None:
            whole = cache.whole
            tables = whole.keys, whole.values, None, None
            bounds.append_in_place(tables, whole.lengths, keys, values, page_size=1)
            whole.lengths = whole.lengths + 1

    def _compact(
        self, where: tuple[int, int], group: HeadGroup, projected: list[Projected], prompt_lengths: Tensor,
        budgets: list[int] | None,
    ) -> LayerCache:  # fmt: skip
        """Compact as the policy says, or to one budget per prompt, and leave room for the tokens to come."""
        parameters, longest = group.parameters, max(len(row.keys) for row in projected)
        rows = [self._of_group(group, row)[0] for row in projected]
        queries = PromptQueries(
            _stacked([row.query for row in rows], min(parameters.window, longest), last=True),
            lambda: _stacked([row.plain_query for row in rows], longest),
            self._rotary_tables(where[0]),
            rows[0].softmax,
        )
        keys = _stacked([row.plain_keys if parameters.positions == "cache" else row.keys for row in rows], longest)
        values = _stacked([row.values for row in rows], longest)
        kept: Compacted
        if parameters.slides:
            kept = keep_recent(keys, values, prompt_lengths, slots=parameters.capacity, sinks=0)
        elif self._is_exempt(group):
            kept = compact(queries.window, keys, values, prompt_lengths, prompt_budget=longest, pool_kernel=1)
        elif budgets is None:
            observed = parameters.observe(queries, prompt_lengths)
            kept = self.method.compact(observed, keys, values, prompt_lengths, parameters)
        else:
            kept = self._compact_to(budgets, queries, keys, values, prompt_lengths)
        survivors = self.read_back(Tokens(*where, parameters, kept.indices.long()), kept.keys, kept.values)
        kept = kept._replace(keys=survivors[0], values=survivors[1])
        cache = LayerCache(kept.keys, kept.values, kept.lengths, softmax=queries.softmax)
        if budgets is not None and parameters.evicts_while_decoding and not parameters.slides:
            cache.budgets = budgets
        self._fill(cache, kept, parameters)
        if parameters.keeps_whole:
            slots = parameters.max_sequence_len
            places = torch.arange(longest).expand(len(rows), longest)
            places = places.masked_fill(places >= prompt_lengths[:, None], -1)
            every_key, every_value = self.read_back(Tokens(*where, parameters, places), keys, values)
            whole = _with_room(every_key, slots), _with_room(every_value, slots)
            cache.whole = LayerCache(*whole, prompt_lengths.clone())
            cache.whole.positions = torch.arange(slots).expand(*keys.shape[:2], slots)
        return cache

    def _fill(self, cache: LayerCache, kept: Compacted, parameters: Rule) -> None:
        """Fill a cache with the kept tokens, with room for the tokens to come; `kept.indices` are logical positions."""
        cache.keys, cache.values = (_with_room(part, parameters.capacity) for part in (kept.keys, kept.values))
        cache.lengths = kept.lengths.to(torch.int64)
        cache.indices, cache.positions = kept.indices, _with_room(kept.indices.long(), parameters.capacity)
        if kept.scores is not None:
            cache.scores = _with_room(kept.scores, parameters.capacity)
        if parameters.has_pages:
            extremes = bounds.page_bounds(cache.keys, cache.lengths, parameters.page_size, fp8=parameters.fp8_bounds)
            cache.page_min, cache.page_max = extremes

    def _compact_to(
        self, budgets: list[int], queries: PromptQueries, keys: Tensor, values: Tensor, prompt_lengths: Tensor
    ) -> Compacted:
        """Apply the method's compaction to each row with its own budget."""
        rows = []
        for b, budget in enumerate(budgets):
            alone = self._parameters.keeping(budget)
            one = slice(b, b + 1)
            observed = queries._replace(window=queries.window[one]).observed
            rows.append(self.method.compact(observed, keys[one], values[one], prompt_lengths[one], alone))
        return _together(rows, self._parameters.most_kept)

    def _compact_turn(self, turn: Turn, rule: Rule, budgets: list[int] | None) -> Compacted:
        """Apply the method's compaction after a turn, to each row with its own budget if rows have some."""
        if rule.slides:
            return keep_recent(turn.keys, turn.values, turn.lengths, slots=rule.capacity, sinks=0)
        if budgets is None:
            return self.method.compact_turn(turn, rule)
        rows = [self.method.compact_turn(turn.row(b), rule.keeping(budget)) for b, budget in enumerate(budgets)]
        return _together(rows, min(rule.capacity, turn.keys.shape[2]))

    def _rules_of_rows(self, rule: Rule, cache: LayerCache) -> list[Rule]:
        if cache.budgets is None:
            return [rule] * len(cache.lengths)
        return [rule.keeping(budget) for budget in cache.budgets]

    def _is_exempt(self, group: HeadGroup) -> bool:
        """Return whether a step reads all that a cache holds: of skipped layers, whole heads, and sliding layers."""
        return group.parameters.policy != self._parameters.policy

    def _select(self, layer: int, group: HeadGroup, new: Projected, cache: LayerCache) -> Tensor:
        """Attend to the tokens that the policy reads, [B,heads,D]; then drop those that it evicts."""
        if self._is_exempt(group):
            return dense_attention(new.query, cache.keys, cache.values, cache.lengths, softmax=cache.softmax)
        query, seen = new.query, cache
        if group.parameters.positions == "cache" and self._config.attention(layer).rotary:
            query = self._rotary(new.plain_query, cache.lengths - 1)
            seen = replace(cache, keys=self._rotated_by_slot(cache.keys))
        step = self._step(query, seen, group.parameters)
        cache.selected = step.selected
        if step.scores is not None:
            cache.scores = step.scores
        for row, kept in enumerate(step.kept or ()):
            cache.keep(row, kept)
        return step.output

    def _step(self, query: Tensor, cache: LayerCache, rule: Rule) -> Selection:
        """Run the method's step, on each row with its own budget if rows have some."""
        if cache.budgets is None:
            return self.method.select(query, cache, rule)
        rows = [
            self.method.select(query[b : b + 1], cache.row(b), alone)
            for b, alone in enumerate(self._rules_of_rows(rule, cache))
        ]
        kept = [lists for row in rows for lists in row.kept or ()] or None
        scores = [row.scores for row in rows if row.scores is not None]
        output = torch.cat([row.output for row in rows])
        return Selection(output, kept=kept, scores=torch.cat(scores) if scores else None)

    def _rotary_tables(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of every position; in a layer that does not rotate, those of the angle zero."""
        cosine, sine = self._rotary.cos, self._rotary.sin
        if self._config.attention(layer).rotary:
            return cosine, sine
        return torch.ones_like(cosine), torch.zeros_like(sine)

    def _rotated_by_slot(self, keys: Tensor) -> Tensor:
        """Rotate keys [B,G,C,D] as if slot i were position i."""
        batch, heads, slots, size = keys.shape
        by_slot = keys.permute(2, 0, 1, 3).reshape(slots, batch * heads, size)
        return self._rotary(by_slot, torch.arange(slots)).reshape(slots, batch, heads, size).permute(1, 2, 0, 3)


def as_stored(tokens: Tokens, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return exact keys and values [B,heads,n,D] of some tokens as a cache of their rule gives them back.

    The reference's caches hold the dequantised values. That is as good as codes, which move and are never made a second
    time."""
    stored = CACHE_FORMATS[tokens.rule.kv_cache]
    return read_back(keys, stored.keys), read_back(values, stored.values)


def _stacked(rows: list[Tensor], slots: int, *, last: bool = False) -> Tensor:
    """Stack rows [n,heads,D] of different lengths to [B,heads,slots,D], padded with zeros at the end.

    With `last`, keep the last tokens and pad with zeros at the front."""
    stacked = rows[0].new_zeros(len(rows), rows[0].shape[1], slots, rows[0].shape[2])
    for target, row in zip(stacked, rows, strict=True):
        count = min(len(row), slots)
        if last:
            target[:, slots - count :] = row[-count:].transpose(0, 1)
        else:
            target[:, :count] = row[:count].transpose(0, 1)
    return stacked


def _together(rows: list[Compacted], slots: int) -> Compacted:
    """Return the kept tokens of single rows as a batch, each with zeros to `slots` slots."""
    missing = [torch.nn.functional.pad(row.indices, (0, slots - row.indices.shape[2]), value=-1) for row in rows]
    scores = [_with_room(row.scores, slots) for row in rows if row.scores is not None]
    return Compacted(
        torch.cat([_with_room(row.keys, slots) for row in rows]),
        torch.cat([_with_room(row.values, slots) for row in rows]),
        torch.cat(missing),
        torch.cat([row.lengths for row in rows]),
        torch.cat(scores) if scores else None,
    )


def _with_room(stored: Tensor, slots: int) -> Tensor:
    """Extend `stored` [B,G,n,...] with zeros to `slots` slots."""
    room = stored.new_zeros(*stored.shape[:2], slots, *stored.shape[3:])
    room[:, :, : stored.shape[2]] = stored
    return room
