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

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.graph_context import PromptLayer
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.base.isolated_runs import (
    Array,
    AttendedEntries,
    ExactList,
    Found,
    PromptCase,
    RunnableAlone,
    StepCase,
    float32,
)
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.operators.attention.tova_attention import TOVA_ATTENTION
from kvc_trt.operators.compaction.tova import COMPACT_TOVA

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.methods.base.turn_context import TurnLayer
    from kvc_trt.operators.emitter import Value
    from kvc_trt.reference import Compacted, LayerCache, Selection, Turn

SPARE_SLOTS = 1
"""Extra slots, since a step attends to the new token before it drops one."""


class LastQuery(PromptEviction):
    """Keep the last tokens of a prompt and the others that its last query attends to most."""

    name = "tova"
    operators = (COMPACT_TOVA,)
    turn = (
        "The last tokens of the conversation stay, and of the others those that the turn's last query attends to most."
    )

    def compact(
        self, observed: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        """Compact every prompt longer than the budget, with one list for all KV heads."""
        from kvc_trt import reference

        return reference.keep_attended(observed, keys, values, prompt_lengths, heavy=_heavy(rule), recent=rule.recent)

    def weighed(self, case: PromptCase, rule: Constants) -> list[AttendedEntries]:
        """Return what the last query attends to, for all KV heads together."""
        return [
            AttendedEntries(case.q_window[row, :, -1:], case.k[row, :, :n], rule.recent, of_layer=True)
            for row, n in enumerate(case.prompt_lengths)
        ]

    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        """Compact stored and new tokens, with one list for all KV heads."""
        return self.compact(turn.queries[:, :, -1:], turn.keys, turn.values, turn.lengths, rule)

    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        """Write the compaction of stored and new tokens in the order of the text."""
        budget = turn.rule.capacity - SPARE_SLOTS
        ordered = turn.join_in_order(budget)
        attended = turn.attend(ordered.keys, ordered.values, ordered.stored)
        turn.compact_turn(COMPACT_TOVA, ordered, ordered=ordered, prompt_budget=budget)
        return attended

    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        """Write compaction to the budget, without the spare slot of a step."""
        prompt.compact(COMPACT_TOVA, prompt_budget=prompt.rule.capacity - SPARE_SLOTS)


class LeastAttended(DecodeSelection):
    """Read everything and drop the token that the query attends to least and that is not recent."""

    name = "tova"
    operators = (TOVA_ATTENTION,)
    evicts_while_decoding = True
    spare_slots = SPARE_SLOTS

    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        """Attend to everything cached, then drop what no longer fits the budget."""
        from kvc_trt import reference

        shares = {"heavy": _heavy(rule), "recent": rule.recent}
        return reference.tova_attention(query, cache.keys, cache.values, cache.lengths, **shares)

    def recent_of(self, rule: Constants, budget: int) -> int:
        """Return the same number in all layers, if it fits."""
        return min(rule.recent, budget)

    def state_of(self, keys: Array, values: Array, lengths: Array, rule: Constants) -> dict[str, Array]:
        """Make the positions of entries, in text order."""
        slots = np.broadcast_to(np.arange(keys.shape[2]), keys.shape[:3])
        present = slots < np.asarray(lengths)[:, None, None]
        return {"slot_positions": np.where(present, slots, -1).astype(np.int32)}

    def run_alone(self, operator: RunnableAlone, case: StepCase, rule: Constants) -> Found:
        """Run a step with a free slot in every row; positions show what stays.

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
            chosen=chosen, moved=((k_cache, keys), (v_cache, values)), computed=((output, single.output.numpy()),)
        )


def _heavy(rule: Constants) -> int:
    """Return how many entries stay for their attention: the budget less the recent tokens."""
    return rule.capacity - SPARE_SLOTS - rule.recent


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive one recent token by default, the rest of the budget contested, and one slot more than the budget."""
    budget = min(inputs.budget, inputs.sequence)
    recent = inputs.value("recent", 1)
    if recent > budget:
        raise InputError(
            f"the token budget is {budget}; expected at least the {recent} recent tokens",
            hint=f"--token-budget {recent}, or fewer --set recent=N",
        )
    return constants(
        inputs, LAST_QUERY, LEAST_ATTENDED,
        capacity=budget + SPARE_SLOTS,
        prompt_budget=min(budget, inputs.max_input_len),
        window=1,
        recent=recent,
    )  # fmt: skip


LAST_QUERY, LEAST_ATTENDED = LastQuery(), LeastAttended()
TOVA = Policy(
    name="tova",
    summary="keep what the newest token attends to most, drop one token at every step",
    source="TOVA, arXiv 2401.06104",
    eviction=LAST_QUERY,
    selection=LEAST_ATTENDED,
    resolve=resolve,
    overrides=("recent", *EVERY_POLICY),
)
