"""StreamingLLM: the first tokens of a text and its last ones ("Efficient Streaming Language Models with Attention
Sinks", arXiv 2309.17453, section 3).

The first `sinks` tokens are always kept, and the last `token_budget - sinks`. Once the budget is used up, each step
drops the oldest of these, so memory does not grow with the answer. A step attends to everything cached.

A turn of a conversation attends exactly to everything stored and to itself; then the first and the last tokens of both
stay. Decode steps would have dropped tokens on the way: M tokens at once are not M steps. With positions="cache" there
are no turns: the rank of a stored key would change with every token of the block.

Shapes: a cache holds min(token budget, longest sequence) entries, the same for all KV heads. Deviations:
positions="original" is the default: keys are stored rotated to their text positions, as in DuoAttention.
positions="cache" is the paper's form: keys are stored unrotated and rotated at every step by their rank in the cache.
Prefill attention is exact, not windowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.errors import InputError
from kvc_trt.methods.base.by_row import (
    SelectionByRow,
    TrimmedByRow,
    budgets_of,
    keep_capacities,
    kept_name,
    rows_alone,
)
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.graph_context import PromptLayer, StepLayer
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, check_integer, constants
from kvc_trt.methods.base.isolated_runs import (
    Array,
    Found,
    RunnableAlone,
    StepCase,
    StepRun,
    TurnCase,
    TurnRun,
    float32,
)
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.full import DENSE
from kvc_trt.operators.attention.recent_attention import (
    RANKED_RECENT_ATTENTION,
    RANKED_RECENT_ATTENTION_BY_ROW,
    RECENT_ATTENTION,
    RECENT_ATTENTION_BY_ROW,
)
from kvc_trt.operators.attention.stored_rows import CAPACITIES
from kvc_trt.operators.shapes import size
from kvc_trt.operators.turns.ring import COMPACT_RING, COMPACT_RING_BY_ROW

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.methods.base.graph_context import TurnLayer
    from kvc_trt.operators.emitter import Emitter, Value
    from kvc_trt.reference import Compacted, LayerCache, Selection, Turn

SINKS = 4


class FirstAndLast(PromptEviction):
    """Keep the first tokens of a prompt and its last ones."""

    name = "recent"
    any_softmax = True
    operators = None
    turn = "The first tokens of the conversation and its last ones stay."
    query_agnostic = True

    @override
    def compact(
        self, observed: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        return reference.keep_recent(keys, values, prompt_lengths, slots=rule.capacity, sinks=rule.sinks)

    @override
    def no_turn(self, rule: Constants) -> str | None:
        if rule.positions == "original":
            return None
        return 'positions count entries of the cache (positions="cache"), which a block of new tokens renumbers'

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        return self.compact(turn.queries, turn.keys, turn.values, turn.lengths, rule)

    @override
    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        """Write the kept tokens into the slots that decode steps would have given them."""
        emit = turn.emit
        stored = emit.Min(turn.entries, [turn.rule.capacity])
        joined = turn.join(stored)
        attended = self._attend(turn, joined.tables, stored)
        inputs = {**joined.tables, "cache_lengths": turn.entries, "lengths": turn.batch.lengths}
        outputs = COMPACT_RING.in_format(turn.rule.cache_format).outputs
        turn.call(COMPACT_RING, inputs, {one.name: turn.updated(one.name) for one in outputs})
        emit.Add(turn.entries, turn.batch.lengths, outputs=[f"lengths.{turn.name}"])
        return attended

    def _attend(self, turn: TurnLayer, tables: Mapping[str, Value], stored: Value) -> Value:
        """Attend from the new tokens to all of the ring, of which `stored` [B] slots are in use, and to each other."""
        return turn.attend(tables, stored)

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        self._store(prompt, prompt.named)

    def _store(self, prompt: PromptLayer, named: Callable[[Sequence[str]], list[str]]) -> Value:
        """Write the kept tokens in ascending order, so that the slot after the sinks is overwritten first.

        `named` gives the tensors of the cache their names. Returns the positions kept, INT64 [B,G,C], -1 if empty."""
        emit, rule, lengths = prompt.emit, prompt.rule, prompt.batch.lengths
        rows = emit.Unsqueeze(lengths, [1])
        slots = np.arange(rule.capacity)
        skipped = emit.Mul(emit.Max(emit.Sub(rows, rule.capacity), 0), (slots >= rule.sinks).astype(np.int64))
        index = emit.Add(skipped, slots)
        stored = emit.Less(slots, rows)
        emit.Min(lengths, rule.capacity, outputs=named(["lengths"]))
        keys = prompt.plain_keys() if rule.positions == "cache" else prompt.keys
        each_head = emit.Concat([1], size(emit, keys, 1), [1], axis=0)
        indices = emit.Expand(emit.Unsqueeze(emit.Where(stored, index, -1), [1]), each_head)
        emit.cast(indices, np.int32, outputs=named(["indices"]))
        place = emit.Unsqueeze(emit.Max(indices, 0), [3])
        occupied = emit.Unsqueeze(stored, [1, 3])
        if rule.cache_format.keys is not None:
            kept = [emit.GatherND(rows_of, place, batch_dims=2) for rows_of in (keys, prompt.values)]
            prompt.store_tokens(kept[0], kept[1], named=named)
            return str(indices)
        for rows_of, tensor in ((keys, "k_cache"), (prompt.values, "v_cache")):
            gathered, zero = emit.GatherND(rows_of, place, batch_dims=2), emit.CastLike(np.float32(0), rows_of)
            emit.Where(occupied, gathered, zero, outputs=named([tensor]))
        return str(indices)

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        return {COMPACT_RING.name: _run_turn}

    @property
    @override
    def by_row(self) -> PromptEviction:
        return FIRST_AND_LAST_BY_ROW


class FirstAndLastByRow(TrimmedByRow, FirstAndLast):
    """Keep as many first and last tokens as a layer may get, then those of each row's budget."""

    name = "recent-by-row"

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        """Write the kept tokens with scores that rank the first ones highest, since the last ones always stay."""

        def named(tensors: Sequence[str]) -> list[str]:
            return [kept_name(_NAMES.get(tensor, tensor), prompt.name) for tensor in tensors]

        emit, indices = prompt.emit, self._store(prompt, named)
        emit.cast(emit.Neg(indices), np.float32, outputs=named(["scores"]))

    @override
    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        emit = turn.emit
        stored = emit.Min(turn.entries, budgets_of(turn))
        joined = turn.join(stored)
        attended = turn.attend(joined.tables, stored)
        capacities = {CAPACITIES.name: turn.state(CAPACITIES.name)}
        inputs = {**joined.tables, "cache_lengths": turn.entries, "lengths": turn.batch.lengths, **capacities}
        outputs = COMPACT_RING_BY_ROW.in_format(turn.rule.cache_format).outputs
        turn.call(COMPACT_RING_BY_ROW, inputs, {one.name: turn.updated(one.name) for one in outputs})
        keep_capacities(turn)
        emit.Add(turn.entries, turn.batch.lengths, outputs=[f"lengths.{turn.name}"])
        return attended

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        return {COMPACT_RING_BY_ROW.name: rows_alone(COMPACT_RING_BY_ROW, _run_turn)}


_NAMES = {"lengths": "cache_lengths", "indices": "slot_positions"}
"""Names of the kept tensors, where they differ from those in a cache."""


class Ring(DecodeSelection):
    """Overwrite the oldest token that is not a sink, then read everything."""

    name = "recent"
    any_softmax = True
    operators = (RECENT_ATTENTION, RANKED_RECENT_ATTENTION)
    evicts_while_decoding = True
    drops_before_append = True

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        return DENSE.select(query, cache, rule)

    @override
    def decode(self, step: StepLayer) -> str:
        """Write the step with rotated keys, or with unrotated ones if positions count entries of the cache.

        In a layer that does not rotate, both are the same."""
        if step.rule.positions == "original" or not step.rotates:
            return step.attend(self.operators[0])
        (query, key), (cosine, sine) = step.plain(), step.batch.rotary_tables()
        return replace(step, query=query, key=key).attend(self.operators[1], {"cosine": cosine, "sine": sine})

    @override
    def recent_of(self, rule: Constants, budget: int) -> int:
        return budget - rule.sinks

    @override
    def recents(self, emit: Emitter, rule: Constants, budgets: Value) -> Value:
        return str(emit.Sub(budgets, rule.sinks))

    @override
    def runs(self) -> Mapping[str, StepRun]:
        return {RECENT_ATTENTION.name: _run, RANKED_RECENT_ATTENTION.name: _run_ranked}

    @property
    @override
    def by_row(self) -> DecodeSelection:
        return RING_BY_ROW


class RingByRow(SelectionByRow, Ring):
    """Overwrite the oldest token of each row's own ring, then read everything."""

    name = "recent-by-row"
    operators = (RECENT_ATTENTION_BY_ROW, RANKED_RECENT_ATTENTION_BY_ROW)

    @property
    @override
    def alike(self) -> DecodeSelection:
        return RING

    @override
    def decode(self, step: StepLayer) -> str:
        return Ring.decode(self, step)


def _run_turn(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    """Run KvcCompactRing while the ring fills and after it has wrapped; as many steps must give the same slots."""
    found = Found()
    for turned in (0, rule.capacity + 3):
        stored = np.minimum(case.cache_lengths + turned, rule.capacity)
        both = replace(case, cache_lengths=stored).joined(1)
        result = operator.run(k=both.k, v=both.v, cache_lengths=case.cache_lengths + turned, lengths=case.lengths)
        expected = [both.k[:, :, : rule.capacity].copy(), both.v[:, :, : rule.capacity].copy()]
        for row, (before, new) in enumerate(zip(case.cache_lengths + turned, case.lengths, strict=True)):
            for i in range(new):
                slot = before + i
                if slot >= rule.capacity:
                    slot = rule.sinks + (slot - rule.sinks) % (rule.capacity - rule.sinks)
                expected[0][row, :, slot], expected[1][row, :, slot] = case.k_new[row, :, i], case.v_new[row, :, i]
        found += Found(moved=tuple(zip(result, expected, strict=True)))
    return found


def _run(operator: RunnableAlone, case: StepCase, rule: Constants) -> Found:
    """Run KvcRecentAttention while the ring fills and after it has wrapped."""
    found = Found()
    for turned in (0, rule.capacity + 3):
        ring = _turned(case, rule, turned)
        output, k_cache, v_cache = operator.run(**{**case.inputs(), "cache_lengths": case.cache_lengths + turned})
        expected = reference.dense_attention(
            float32(case.query), float32(ring.keys), float32(ring.values), ring.lengths, softmax=case.softmax
        )
        found += Found(moved=((k_cache, ring.keys), (v_cache, ring.values)), computed=((output, expected.numpy()),))
    return found


def _run_ranked(operator: RunnableAlone, case: StepCase, rule: Constants) -> Found:
    """Run KvcRankedRecentAttention, comparing with keys rotated by their rank."""
    found, half = Found(), case.query.shape[2] // 2
    angles = np.outer(np.arange(rule.capacity), 10_000.0 ** (-np.arange(half) / half))
    tables = {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
    for turned in (0, rule.capacity + 3):
        ring = _turned(case, rule, turned)
        result = operator.run(**{**case.inputs(), "cache_lengths": case.cache_lengths + turned}, **tables)
        keys, values = (np.take_along_axis(rows, ring.by_rank, axis=2) for rows in (ring.keys, ring.values))
        newest = ring.lengths.numpy() - 1
        query = _rotated(case.query[:, :, None], tables, newest[:, None, None])[:, :, 0]
        turned_keys = _rotated(keys, tables, np.arange(rule.capacity)[None, None])
        rows = turned_keys, float32(values), ring.lengths
        expected = reference.dense_attention(query, *rows, softmax=case.softmax)
        found += Found(
            moved=((result[1], ring.keys), (result[2], ring.values)), computed=((result[0], expected.numpy()),)
        )
    return found


class _TurnedRing(NamedTuple):
    """A ring after its append: keys, values [B,G,C,D], lengths [B], and the slots in rank order."""

    keys: Array
    values: Array
    lengths: Tensor
    by_rank: Array
    """INT64 [B,1,C,1]: the slot of each rank."""


def _turned(case: StepCase, rule: Constants, turned: int) -> _TurnedRing:
    import torch

    stored, ring = case.cache_lengths + turned, rule.capacity - rule.sinks
    over = stored >= rule.capacity
    slots = np.where(over, rule.sinks + (stored - rule.sinks) % ring, stored)
    keys, values, rows = case.k_cache.copy(), case.v_cache.copy(), np.arange(len(slots))
    keys[rows, :, slots], values[rows, :, slots] = case.k_new, case.v_new
    order = np.tile(np.arange(rule.capacity), (len(slots), 1))
    for row in np.flatnonzero(over):
        order[row, rule.sinks :] = np.roll(order[row, rule.sinks :], rule.sinks - slots[row] - 1)
    lengths = torch.from_numpy(np.minimum(stored + 1, rule.capacity))
    return _TurnedRing(keys, values, lengths, order[:, None, :, None])


def _rotated(rows: Array, tables: dict[str, Array], ranks: Array) -> Tensor:
    """Apply the rotary embedding to rows [B,heads,n,D] at `ranks`, which broadcast to [B,heads,n]."""
    from kvc_trt.reference.layers import rotated

    cosine, sine = (float32(tables[name][ranks]) for name in ("cosine", "sine"))
    return rotated(float32(rows), cosine, sine)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive four sinks by default; the rest of the budget is recent tokens."""
    return keep_recent(inputs, inputs.value("sinks", SINKS))


def keep_recent(inputs: PolicyInputs, sinks: int) -> PolicyParameters:
    """Return the parameters of a cache of `sinks` first tokens and as many last ones as fit in the budget."""
    recent = inputs.value("recent", max(1, inputs.budget - sinks))
    check_integer("recent", recent, 1)
    if sinks + recent > inputs.budget:
        raise InputError(
            f"the token budget is {inputs.budget}; expected at least {sinks + recent}: {sinks} sinks and {recent} "
            f"recent token{'s' * (recent > 1)}",
            hint=f"--token-budget {sinks + recent}",
        )
    capacity = min(sinks + recent, inputs.sequence)
    return constants(
        inputs, FIRST_AND_LAST, RING,
        capacity=capacity,
        prompt_budget=min(capacity, inputs.max_input_len),
        window=1,
        sinks=min(sinks, capacity - 1),
        recent=recent,
        positions=inputs.choice("positions", "original"),
    )  # fmt: skip


FIRST_AND_LAST, RING = FirstAndLast(), Ring()
FIRST_AND_LAST_BY_ROW, RING_BY_ROW = FirstAndLastByRow(), RingByRow()
STREAMING_LLM = Policy(
    name="streaming-llm",
    summary="keep the first tokens and the last ones, drop one at every step",
    source="StreamingLLM, arXiv 2309.17453",
    eviction=FIRST_AND_LAST,
    selection=RING,
    resolve=resolve,
    overrides=("sinks", "recent", "positions", *EVERY_POLICY),
    candidate=True,
)
