"""Methods that keep the last tokens and the best-scored others, of a prompt and at every step (H2O, TOVA).

A step attends to everything cached, the new token included, and drops one token once the budget is exceeded. So a cache
has one slot more than the budget, and its slots hold tokens in any order: `slot_positions` says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.inputs import PolicyInputs, constants
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.base.scored_eviction import ScoredEviction

if TYPE_CHECKING:
    from kvc_trt.methods.base.graph_context import PromptLayer, TurnLayer
    from kvc_trt.methods.base.isolated_runs import Array
    from kvc_trt.operators.emitter import Value

SPARE_SLOTS = 1
"""Extra slots, since a step attends to the new token before it drops one."""


class BestBesideRecent(ScoredEviction):
    """Keep the last tokens of a prompt and the best of the others, which compete again at every step."""

    turn_state = ()

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        """Write compaction to the budget, without the spare slot of a step."""
        prompt.compact(self.operators[0], self.prompt_inputs(prompt), prompt_budget=stored_budget(prompt.rule))

    @override
    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        """Write the compaction of stored and new tokens in the order of the text."""
        budget = stored_budget(turn.rule)
        ordered = turn.join_in_order(budget)
        attended = turn.attend(ordered.keys, ordered.values, ordered.stored)
        operator = self.operator_of_turn or self.operators[0]
        turn.compact_turn(operator, ordered, self.turn_inputs(turn), ordered=ordered, prompt_budget=budget)
        return attended


class DropWorstBesideRecent(DecodeSelection):
    """Read everything and drop the token of the lowest score that is not recent."""

    evicts_while_decoding = True
    spare_slots = SPARE_SLOTS

    @override
    def state_of(self, keys: Array, values: Array, lengths: Array, rule: Constants) -> dict[str, Array]:
        """Make the positions of entries, in text order."""
        slots = np.broadcast_to(np.arange(keys.shape[2]), keys.shape[:3])
        present = slots < np.asarray(lengths)[:, None, None]
        return {"slot_positions": np.where(present, slots, -1).astype(np.int32)}


def stored_budget(rule: Constants) -> int:
    """Return how many entries a prompt, a turn or a step leaves: all slots but the spare one."""
    return rule.capacity - SPARE_SLOTS


def contested(rule: Constants) -> int:
    """Return how many entries stay for their score: the budget less the recent tokens."""
    return stored_budget(rule) - rule.recent


def beside_recent(
    inputs: PolicyInputs, eviction: PromptEviction, selection: DecodeSelection, *, recent: int, window: int
) -> PolicyParameters:
    """Return the parameters of a cache that keeps `recent` last tokens, unless they are set, and the best others."""
    budget, recent = min(inputs.budget, inputs.sequence), inputs.value("recent", recent)
    if recent > budget:
        raise InputError(
            f"the token budget is {budget}; expected at least the {recent} recent tokens",
            hint=f"--token-budget {recent}, or fewer --set recent=N",
        )
    return constants(
        inputs, eviction, selection,
        capacity=budget + SPARE_SLOTS,
        prompt_budget=min(budget, inputs.max_input_len),
        window=window,
        recent=recent,
    )  # fmt: skip
