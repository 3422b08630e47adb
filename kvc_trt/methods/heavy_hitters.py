"""H2O: the last tokens, and of the others those that have received most attention ("H2O: Heavy-Hitter Oracle for
Efficient Generative Inference of Large Language Models", arXiv 2306.14048, section 4).

Every cache entry carries the attention probability it has received so far from all queries of the prompt and the
answer. Half of the budget is for the last tokens, the other half for the largest sums. A step attends to everything
cached, the new token included, adds its probabilities, and drops one token once the budget is exceeded.

A turn of a conversation attends exactly to everything stored and to itself, and adds the attention of its queries; then
the same shares of stored and new tokens stay. Steps would have dropped tokens on the way, so M tokens at once are not M
steps.

Shapes: token budget + 1 entries per KV head, sums float32 [B,G,C], each KV head with its own entries. Deviations: the
sums of a group's query heads are added and the group shares one list (the released code has no grouped-query
attention); budgets are absolute (the released code's simulation uses shares of the prompt); sums are not divided by the
number of queries that saw an entry; positions are those of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.methods.base.by_row import SelectionByRow, rows_alone
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs
from kvc_trt.methods.base.isolated_runs import (
    Array,
    ExactList,
    Found,
    PromptCase,
    RunnableAlone,
    StepCase,
    TurnCase,
    TurnRun,
    float32,
)
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction, judged_as
from kvc_trt.methods.base.scored_eviction import (
    BestBesideRecent,
    BestBesideRecentByRow,
    DropWorstBesideRecent,
    beside_recent,
    contested,
    stored_budget,
    until_trimmed,
)
from kvc_trt.methods.rankings.attended_entries import AttendedEntries
from kvc_trt.operators.attention.heavy_hitter_attention import (
    HEAVY_HITTER_ATTENTION,
    HEAVY_HITTER_ATTENTION_BY_ROW,
)
from kvc_trt.operators.compaction.heavy_hitters import COMPACT_HEAVY_HITTERS
from kvc_trt.operators.turns.heavy_hitters import (
    COMPACT_HEAVY_HITTERS_OF_TURN,
    COMPACT_HEAVY_HITTERS_OF_TURN_BY_ROW,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.operators.emitter import Emitter, Value
    from kvc_trt.operators.schema import Operator
    from kvc_trt.reference import Compacted, LayerCache, Selection, Turn


class MostAttended(BestBesideRecent):
    """Keep the last tokens of a prompt and the others that its queries attended to most.

    Its operator writes the score alone, like those of other scored evictions. Its isolated runs are its own, because
    all queries of a prompt make the score, and because the score of what stays is a result too."""

    name = "heavy-hitters"
    operators = (COMPACT_HEAVY_HITTERS,)
    operator_of_turn = COMPACT_HEAVY_HITTERS_OF_TURN
    turn = "The last tokens of the conversation stay, and of the others those that received the most attention so far."
    observes_every_query = True

    @override
    def compact(
        self, observed: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        """Keep the last tokens and the heavy hitters of longer prompts; `observed` is all queries."""
        shares = {"heavy": contested(rule), "recent": rule.recent}
        return reference.keep_heavy_hitters(observed, keys, values, prompt_lengths, **shares)

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        if turn.scores is None:
            raise ValueError("scores are missing; expected the attention received by every entry [B,G,T]")
        tables = turn.queries, turn.keys, turn.values, turn.lengths, turn.new_lengths, turn.scores
        return reference.keep_heavy_hitters_of_turn(*tables, heavy=contested(rule), recent=rule.recent)

    @override
    def run_alone(self, operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
        """Run compaction over a whole prompt of queries: the queries of the case's window, repeated."""
        import torch

        rule = until_trimmed(rule)
        slots, window = case.k.shape[2], case.q_window.shape[2]
        queries = np.ascontiguousarray(case.q_window[:, :, np.arange(slots) % window])
        aligned = np.zeros_like(queries)
        for row, n in enumerate(case.prompt_lengths):
            aligned[row, :, slots - n :] = queries[row, :, :n]
        results = operator.run(q=queries, k=case.k, v=case.v, prompt_lengths=case.prompt_lengths)
        rows = torch.from_numpy(case.prompt_lengths)
        q, k, v = (float32(table) for table in (aligned, case.k, case.v))
        single = self.compact(q, k, v, rows, rule)
        double = self.compact(q.double(), k.double(), v.double(), rows, rule)
        attended = [
            AttendedEntries(queries[row, :, :n], case.k[row, :, :n], rule.recent)
            for row, n in enumerate(case.prompt_lengths)
        ]
        double = _with_scores_of(_indices(COMPACT_HEAVY_HITTERS, results), double, attended)
        return self.judged(results, case, rule, double, single, attended)

    @property
    @override
    def by_row(self) -> PromptEviction:
        return MOST_ATTENDED_BY_ROW

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        return {COMPACT_HEAVY_HITTERS_OF_TURN.name: self._run_turn}

    def _run_turn(self, operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
        """Run the compaction after a turn, over stored tokens in any slot with random scores."""
        import torch

        case = replace(case, cache_lengths=np.minimum(case.cache_lengths, stored_budget(rule)))
        both, slots = case.joined(case.q.shape[2]), case.k_cache.shape[2]
        order = np.broadcast_to(np.arange(slots)[::-1], case.k_cache.shape[:3]).astype(np.int32)
        scores = np.random.default_rng(7).random(order.shape, np.float32)
        results = operator.run(
            q=case.q, k=both.k, v=both.v, stored_scores=scores, order=np.ascontiguousarray(order),
            stored_lengths=case.cache_lengths, prompt_lengths=both.prompt_lengths, lengths=case.lengths,
        )  # fmt: skip
        held = np.zeros(both.k.shape[:3], np.float32)
        held[:, :, :slots] = np.where(np.arange(slots) < case.cache_lengths[:, None, None], scores[:, :, ::-1], 0)
        lengths, new = torch.from_numpy(both.prompt_lengths), torch.from_numpy(case.lengths)
        shares = {"heavy": contested(rule), "recent": rule.recent}
        tables = [float32(table) for table in (both.q_window, both.k, both.v, held)]
        single, double = (
            reference.keep_heavy_hitters_of_turn(q, k, v, lengths, new, paid, **shares)
            for q, k, v, paid in (tables, [table.double() for table in tables])
        )
        attended = [
            AttendedEntries(case.q[row, :, :added], both.k[row, :, :n], rule.recent, held[row, :, :n])
            for row, (added, n) in enumerate(zip(case.lengths, both.prompt_lengths, strict=True))
        ]
        double = _with_scores_of(_indices(COMPACT_HEAVY_HITTERS_OF_TURN, results), double, attended)
        return judged_as(COMPACT_HEAVY_HITTERS_OF_TURN, results, both, rule, double, single, attended)


class MostAttendedByRow(BestBesideRecentByRow, MostAttended):
    """Keep the heavy hitters of as many tokens as a layer may get, then those of each row's budget."""

    name = "heavy-hitters-by-row"
    operator_of_turn = COMPACT_HEAVY_HITTERS_OF_TURN_BY_ROW

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        own = COMPACT_HEAVY_HITTERS_OF_TURN_BY_ROW
        return {own.name: rows_alone(own, self._run_turn)}


class HeavyHitters(DropWorstBesideRecent):
    """Read everything and drop the token that received the least attention and is not recent."""

    name = "heavy-hitters"
    operators = (HEAVY_HITTER_ATTENTION,)

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        if cache.scores is None:
            raise ValueError("scores are missing; expected the attention received by every entry [B,G,C]")
        state = cache.keys, cache.values, cache.lengths, cache.scores
        return reference.heavy_hitter_attention(query, *state, heavy=contested(rule), recent=rule.recent)

    @override
    def recent_of(self, rule: Constants, budget: int) -> int:
        """Return the same share of the budget as in the other layers."""
        whole = _whole(rule)
        return budget - budget // 2 if _is_half(rule) else max(1, budget * rule.recent // whole)

    @override
    def recents(self, emit: Emitter, rule: Constants, budgets: Value) -> Value:
        if _is_half(rule):
            return str(emit.Sub(budgets, emit.Div(budgets, 2)))
        return str(emit.Max(emit.Div(emit.Mul(budgets, rule.recent), _whole(rule)), 1))

    @property
    @override
    def by_row(self) -> DecodeSelection:
        return HEAVY_HITTERS_BY_ROW

    @override
    def state_of(self, keys: Array, values: Array, lengths: Array, rule: Constants) -> dict[str, Array]:
        """Make random scores, with entries in text order."""
        positions = super().state_of(keys, values, lengths, rule)
        present = positions["slot_positions"] >= 0
        return {"scores": np.random.default_rng(7).random(present.shape, np.float32) * present, **positions}

    @override
    def run_alone(self, operator: RunnableAlone, case: StepCase, rule: Constants) -> Found:
        """Run a step with a free slot in every row; positions show the kept tokens."""
        import torch

        stored = np.minimum(case.cache_lengths, rule.capacity - 1)
        case = replace(case, cache_lengths=stored)
        before = self.state_of(case.k_cache, case.v_cache, stored, rule)
        result = operator.run(**case.inputs(), **before, positions=stored)
        output, k_cache, v_cache, new_scores, slot_positions = result
        keys, values, lengths = case.appended()
        cache = self.layer_cache(float32(keys), float32(values), torch.from_numpy(lengths), rule)
        cache.scores = torch.from_numpy(before["scores"])
        step = self.select(float32(case.query), cache, rule)
        assert step.kept is not None
        assert step.scores is not None
        lists = []
        for row, kept in enumerate(step.kept):
            stay = np.sort(np.where(slot_positions[row] < 0, np.iinfo(np.int32).max, slot_positions[row]), axis=-1)
            m = lengths[row]
            attended = AttendedEntries(
                case.query[row, :, None], keys[row, :, :m], rule.recent, before["scores"][row, :, :m]
            )
            lists.append(ExactList(row, stay[:, : kept.shape[1]].astype(np.int64), (kept.numpy(),), attended))
        kept_scores = np.where(slot_positions >= 0, step.scores.numpy(), 0)
        return Found(
            lists=lists,
            moved=((k_cache, keys), (v_cache, values)),
            computed=((output, step.output.numpy()), (new_scores, kept_scores)),
        )


class HeavyHittersByRow(SelectionByRow, HeavyHitters):
    """Drop the token that received the least attention, in rows that use different numbers of slots."""

    name = "heavy-hitters-by-row"
    operators = (HEAVY_HITTER_ATTENTION_BY_ROW,)

    @property
    @override
    def alike(self) -> DecodeSelection:
        return HEAVY_HITTERS


def _whole(rule: Constants) -> int:
    """Return the budget of which `recent` is a share: of all layers, where they differ the mean."""
    return min(rule.token_budget, rule.max_sequence_len)


def _is_half(rule: Constants) -> bool:
    return rule.recent == _whole(rule) - _whole(rule) // 2


def _indices(operator: Operator, results: Sequence[Array]) -> Array:
    return results[[one.name for one in operator.outputs].index("indices")]


def _with_scores_of(indices: Array, double: Compacted, attended: Sequence[AttendedEntries]) -> Compacted:
    """Return `double` with the scores of the entries `indices` [B,G,C], which may be others than it keeps."""
    import torch

    from kvc_trt.reference.methods.heavy_hitters import received_in_prompt

    assert double.scores is not None
    scores = double.scores.clone()
    lists = torch.from_numpy(indices[:, :, : scores.shape[2]].astype(np.int64))
    for row, entries in enumerate(attended):
        if not torch.equal(lists[row], double.indices[row].long()):
            queries, keys = (torch.from_numpy(table.astype(np.float64)) for table in (entries.queries, entries.keys))
            received = received_in_prompt(queries, keys)
            if entries.received is not None:
                received += torch.from_numpy(entries.received)
            there = lists[row].clamp(0, received.shape[1] - 1)
            scores[row] = received.gather(1, there).masked_fill(lists[row] < 0, 0)
    return double._replace(scores=scores)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive recent tokens as half of the budget, rounded up, and one slot more than the budget."""
    budget = min(inputs.budget, inputs.sequence)
    half = budget - budget // 2
    return beside_recent(inputs, MOST_ATTENDED, HEAVY_HITTERS, recent=half, window=inputs.max_input_len)


MOST_ATTENDED, HEAVY_HITTERS = MostAttended(), HeavyHitters()
MOST_ATTENDED_BY_ROW, HEAVY_HITTERS_BY_ROW = MostAttendedByRow(), HeavyHittersByRow()
H2O = Policy(
    name="h2o",
    summary="keep the last tokens and those that were attended to most, drop one at every step",
    source="H2O, arXiv 2306.14048",
    eviction=MOST_ATTENDED,
    selection=HEAVY_HITTERS,
    resolve=resolve,
    overrides=("recent", *EVERY_POLICY),
)
