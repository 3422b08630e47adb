"""TOVA: every step drops the token that the newest query attends to least ("Transformers are Multi-State RNNs",
arXiv 2401.06104, section 3).

A prompt keeps the tokens that its last query attends to most. A step attends to everything cached, the new token
included, and drops one token once the budget is exceeded. All KV heads of a layer keep the same tokens: the score is
the query's attention probability, summed over all query heads. Scores are not carried from step to step.

A turn of a conversation attends exactly to everything stored and to itself; then those of stored and new tokens stay
that its last query attends to most. Steps would have dropped tokens on the way, so M tokens at once are not M steps.

Shapes: token budget + 1 entries per KV head. Deviations: the newest token is always kept (as published it competes);
scores are summed over heads (the paper takes the mean); positions are those of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.base.scored_eviction import (
    BestBesideRecent,
    BestBesideRecentByRow,
    DropWorstBesideRecent,
    beside_recent,
    contested,
    until_trimmed,
)
from kvc_trt.methods.rankings.attended_entries import AttendedEntries
from kvc_trt.operators.attention.tova_attention import TOVA_ATTENTION, TOVA_ATTENTION_BY_ROW
from kvc_trt.operators.compaction.tova import (
    COMPACT_TOVA,
    COMPACT_TOVA_OF_TURN,
    COMPACT_TOVA_OF_TURN_BY_ROW,
    COMPACT_TOVA_SCORED,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.operators.emitter import Emitter, Value
    from kvc_trt.reference import Compacted, LayerCache, Selection, Turn


class LastQuery(BestBesideRecent):
    """Keep the last tokens of a prompt and the others that its last query attends to most."""

    name = "tova"
    operators = (COMPACT_TOVA,)
    operator_of_stored = COMPACT_TOVA_OF_TURN
    turn = (
        "The last tokens of the conversation stay, and of the others those that the turn's last query attends to most."
    )

    @override
    def compact(
        self, observed: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        """Compact every prompt longer than the budget, with one list for all KV heads."""
        heavy = contested(rule)
        return reference.keep_attended(observed, keys, values, prompt_lengths, heavy=heavy, recent=rule.recent)

    @override
    def weighed(self, case: PromptCase, rule: Constants) -> list[AttendedEntries]:
        """Return the entries weighed by the last query, for all KV heads together."""
        return [
            AttendedEntries(case.q_window[row, :, -1:], case.k[row, :, :n], rule.recent, of_layer=True)
            for row, n in enumerate(case.prompt_lengths)
        ]

    @property
    @override
    def by_row(self) -> PromptEviction:
        return LAST_QUERY_BY_ROW

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        return self.compact(turn.queries[:, :, -1:], turn.keys, turn.values, turn.lengths, rule)


class LastQueryByRow(BestBesideRecentByRow, LastQuery):
    """Keep the tokens that the last query attends to most: first as many as a layer may get, then each row's budget."""

    name = "tova-by-row"
    operators = (COMPACT_TOVA_SCORED,)
    operator_of_turn = COMPACT_TOVA_OF_TURN_BY_ROW

    @override
    def run_alone(self, operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
        return super().run_alone(operator, case, until_trimmed(rule))

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        def run(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
            return LAST_QUERY.run_alone(operator, case.joined(1), rule)

        own = COMPACT_TOVA_OF_TURN_BY_ROW
        return {own.name: rows_alone(own, run)}


class LeastAttended(DropWorstBesideRecent):
    """Read everything and drop the token that the query attends to least and that is not recent."""

    name = "tova"
    operators = (TOVA_ATTENTION,)

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        shares = {"heavy": contested(rule), "recent": rule.recent}
        return reference.tova_attention(query, cache.keys, cache.values, cache.lengths, **shares)

    @override
    def recent_of(self, rule: Constants, budget: int) -> int:
        return min(rule.recent, budget)

    @override
    def recents(self, emit: Emitter, rule: Constants, budgets: Value) -> Value:
        return str(emit.Min(budgets, rule.recent))

    @property
    @override
    def by_row(self) -> DecodeSelection:
        return LEAST_ATTENDED_BY_ROW

    @override
    def run_alone(self, operator: RunnableAlone, case: StepCase, rule: Constants) -> Found:
        """Run a step with a free slot in every row; positions show the kept tokens.

        The reference runs in float64 and in float32; where these differ, rounding decides."""
        import torch

        stored = np.minimum(case.cache_lengths, rule.capacity - 1)
        case = replace(case, cache_lengths=stored)
        before = self.state_of(case.k_cache, case.v_cache, stored, rule)
        output, k_cache, v_cache, after = operator.run(**case.inputs(), **before, positions=stored)
        keys, values, lengths = case.appended()
        (query, k, v), rows = (float32(table) for table in (case.query, keys, values)), torch.from_numpy(lengths)
        single = self.select(query, self.layer_cache(k, v, rows, rule), rule)
        double = self.select(query.double(), self.layer_cache(k.double(), v.double(), rows, rule), rule)
        assert single.kept is not None
        assert double.kept is not None
        chosen = []
        for row, lists in enumerate(zip(double.kept, single.kept, strict=True)):
            stay = np.sort(np.where(after[row] < 0, np.iinfo(np.int32).max, after[row]), axis=-1).astype(np.int64)
            attended = AttendedEntries(
                case.query[row, :, None], keys[row, :, : lengths[row]], rule.recent, of_layer=True
            )
            expected = (lists[0].numpy(), lists[1].numpy())
            chosen.append(ExactList(row, stay[:, : expected[0].shape[1]], expected, attended))
        return Found(
            lists=chosen, moved=((k_cache, keys), (v_cache, values)), computed=((output, single.output.numpy()),)
        )


class LeastAttendedByRow(SelectionByRow, LeastAttended):
    """Drop the token that the query attends to least, in rows that use different numbers of slots."""

    name = "tova-by-row"
    operators = (TOVA_ATTENTION_BY_ROW,)

    @property
    @override
    def alike(self) -> DecodeSelection:
        return LEAST_ATTENDED


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive one recent token by default, the rest of the budget contested, and one slot more than the budget."""
    return beside_recent(inputs, LAST_QUERY, LEAST_ATTENDED, recent=1, window=1)


LAST_QUERY, LEAST_ATTENDED = LastQuery(), LeastAttended()
LAST_QUERY_BY_ROW, LEAST_ATTENDED_BY_ROW = LastQueryByRow(), LeastAttendedByRow()
TOVA = Policy(
    name="tova",
    summary="keep what the newest token attends to most, drop one token at every step",
    source="TOVA, arXiv 2401.06104",
    eviction=LAST_QUERY,
    selection=LEAST_ATTENDED,
    resolve=resolve,
    overrides=("recent", *EVERY_POLICY),
    candidate=True,
)
