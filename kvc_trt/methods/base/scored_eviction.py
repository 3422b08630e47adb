"""Prompt evictions that keep the tokens of the highest score: a method states the score, the rest is the same for all.

A method names the operator that scores and keeps (`kvc_trt/operators/compaction/scored.py`), writes the inputs that it
reads beyond queries, keys and values, and calls the reference in `compact`.

H2O and TOVA keep the last tokens beside the best ones, and go on so at every step: a step attends to everything cached,
the new token included, and drops one token once the budget is exceeded. So their caches have one slot more than the
budget, and the slots hold tokens in any order: `slot_positions` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt.errors import InputError
from kvc_trt.methods.base.by_row import TrimmedByRow, budgets_of, keep_capacities, kept_name
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection, Rule, decode_selection
from kvc_trt.methods.base.inputs import PolicyInputs, check_integer, constants
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.operators.attention.heavy_hitter_attention import SLOT_POSITIONS
from kvc_trt.operators.attention.stored_rows import RECENTS
from kvc_trt.operators.compaction.trim_beside_recent import BUDGETS
from kvc_trt.operators.schema import Operator, Tensor

if TYPE_CHECKING:
    from kvc_trt.methods.base.graph_context import PromptLayer, TurnLayer
    from kvc_trt.methods.base.isolated_runs import Array, Found, RunnableAlone, TurnCase, TurnRun
    from kvc_trt.operators.emitter import Value
    from kvc_trt.reference import Compacted, Turn

SPARE_SLOTS = 1
"""Extra slots, since a step attends to the new token before it drops one."""


class ScoredEviction(PromptEviction):
    """Keep the tokens that score best: those of a prompt, and those stored and new after a turn.

    No step evicts, so the slots of a cache hold tokens in the order of the text.
    """

    operators: tuple[Operator, ...]
    operator_of_turn: Operator | None = None
    """The operator that compacts stored and new tokens; None if it is the first of `operators`."""
    operator_of_stored: Operator | None = None
    """The operator that does so where the cache has a format; None if it is the same."""
    turn_state: tuple[Tensor, ...] = (SLOT_POSITIONS,)

    def prompt_inputs(self, prompt: PromptLayer) -> Mapping[str, Value]:
        """Graph: write the inputs of the operator that `PromptLayer.compact` does not know."""
        return {}

    def turn_inputs(self, turn: TurnLayer) -> Mapping[str, Value]:
        """Graph: write the inputs of the turn's operator that `TurnLayer.compact_turn` does not know."""
        return {}

    def turns_operator(self, rule: Constants) -> Operator:
        """Return the operator that compacts stored and new tokens of a cache of this rule."""
        of_exact = self.operator_of_turn or self.operators[0]
        return of_exact if rule.cache_format.keys is None else self.operator_of_stored or of_exact

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        prompt.compact(self.operators[0], self.prompt_inputs(prompt), bounds=bounds)

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        """Return the run of the operator that it has for stored and new tokens: over both as over a prompt."""

        def run(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
            return self.run_alone(operator, case.joined(1), rule)

        return {} if self.operator_of_stored is None else {self.operator_of_stored.name: run}

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        """Compact stored and new tokens like a prompt."""
        return self.compact(turn.queries, turn.keys, turn.values, turn.lengths, rule)

    @override
    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        joined = turn.join(turn.entries)
        attended = turn.attend(joined.tables, turn.entries)
        turn.compact_turn(self.turns_operator(turn.rule), joined, self.turn_inputs(turn), bounds=bounds)
        return attended


def checked_prompt_budget(
    inputs: PolicyInputs, derived: int, *, least: int, least_is: str, setting: str | None = None
) -> int:
    """Return the prompt budget, at most the longest prompt; InputError if fewer than `least` tokens are kept.

    `least_is` describes these tokens, and `setting` is the override that lowers their number.
    """
    budget = min(inputs.value("prompt_budget", derived), inputs.max_input_len)
    if budget < min(least, inputs.max_input_len):
        others = "or lower --max-output-len" if setting is None else f"lower --max-output-len, or --set {setting}=N"
        raise InputError(
            f"the prompt budget is {budget} tokens (token budget {inputs.budget}, new {inputs.max_output_len}); "
            f"expected at least {least_is}",
            hint=f"raise --token-budget, {others}",
        )
    return budget


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
        attended = turn.attend(ordered.tables, ordered.stored)
        operator = self.turns_operator(turn.rule)
        turn.compact_turn(operator, ordered, self.turn_inputs(turn), ordered=ordered, prompt_budget=budget)
        return attended


class BestBesideRecentByRow(TrimmedByRow, BestBesideRecent):
    """Keep as many tokens as a layer may get, then those of each row's budget.

    The first of `operators` gives scores; `operator_of_turn` has the rows' budgets and recent tokens as inputs."""

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        operator, rule = self.operators[0].in_format(prompt.rule.cache_format), until_trimmed(prompt.rule)
        names = {one.name: kept_name(one.name, prompt.name) for one in operator.outputs}
        given, budget = self.prompt_inputs(prompt), stored_budget(rule)
        prompt.compact(self.operators[0], given, outputs=names, prompt_budget=budget, recent=rule.recent)

    @override
    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        """Write the compaction of stored and new tokens in the order of the text to the rows' budgets."""
        assert self.operator_of_turn is not None
        budgets = budgets_of(turn)
        ordered = turn.join_in_order(budgets)
        attended = turn.attend(ordered.tables, ordered.stored)
        recents = decode_selection(turn.rule.decode_selection).recents(turn.emit, turn.rule, budgets)
        given = {**self.turn_inputs(turn), BUDGETS.name: budgets, RECENTS.name: recents}
        most = stored_budget(turn.rule)
        turn.compact_turn(self.operator_of_turn, ordered, given, ordered=ordered, prompt_budget=most)
        keep_capacities(turn)
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


def until_trimmed(rule: Rule) -> Rule:
    """Return the rule by which a prompt is kept where it is trimmed to the budgets of rows; else the rule itself."""
    if rule.squeeze_share is None:
        return rule
    return decode_selection(rule.decode_selection).at_budget(rule, stored_budget(rule))


def contested(rule: Constants) -> int:
    """Return how many entries stay for their score: the budget less the recent tokens."""
    return stored_budget(rule) - rule.recent


def beside_recent(
    inputs: PolicyInputs, eviction: PromptEviction, selection: DecodeSelection, *, recent: int, window: int
) -> PolicyParameters:
    """Return the parameters of a cache that keeps `recent` last tokens, unless they are set, and the best others."""
    budget, recent = min(inputs.budget, inputs.sequence), inputs.value("recent", recent)
    check_integer("recent", recent, 1)
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
