"""Prompt evictions that keep the tokens of the highest score: a method states the score, the rest is the same for all.

A method names the operator that scores and keeps (`kvc_trt/operators/compaction/scored.py`), writes the inputs that it
reads beyond queries, keys and values, and calls the reference in `compact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.inputs import PolicyInputs
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.operators.attention.heavy_hitter_attention import SLOT_POSITIONS
from kvc_trt.operators.schema import Operator, Tensor

if TYPE_CHECKING:
    from kvc_trt.methods.base.graph_context import PromptLayer, TurnLayer
    from kvc_trt.operators.emitter import Value
    from kvc_trt.reference import Compacted, Turn


class ScoredEviction(PromptEviction):
    """Keep the tokens that score best: those of a prompt, and those stored and new after a turn.

    No step evicts, so the slots of a cache hold tokens in the order of the text.
    """

    operators: tuple[Operator, ...]
    operator_of_turn: Operator | None = None
    """The operator that compacts stored and new tokens; None if it is the first of `operators`."""
    turn_state: tuple[Tensor, ...] = (SLOT_POSITIONS,)

    def prompt_inputs(self, prompt: PromptLayer) -> Mapping[str, Value]:
        """Graph: write the inputs of the operator that `PromptLayer.compact` does not know."""
        return {}

    def turn_inputs(self, turn: TurnLayer) -> Mapping[str, Value]:
        """Graph: write the inputs of the turn's operator that `TurnLayer.compact_turn` does not know."""
        return {}

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        prompt.compact(self.operators[0], self.prompt_inputs(prompt), bounds=bounds)

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        """Compact stored and new tokens like a prompt."""
        return self.compact(turn.queries, turn.keys, turn.values, turn.lengths, rule)

    @override
    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        joined = turn.join(turn.entries)
        attended = turn.attend(joined.keys, joined.values, turn.entries)
        turn.compact_turn(self.operator_of_turn or self.operators[0], joined, self.turn_inputs(turn), bounds=bounds)
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
