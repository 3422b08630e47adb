"""KeyDiff: keep the prompt tokens whose keys differ most from the mean direction ("KeyDiff: Key Similarity-Based
KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained Environments", arXiv 2504.15364, section 3).

Queries are not used, so it does not matter which question follows. A step attends densely to the kept tokens. After a
turn of a conversation, stored and new tokens are ranked like a prompt; generated tokens compete.

Shapes: token budget - new tokens of a prompt per KV head, and room for the new ones. Deviations: a prompt is ranked
once as a whole (the paper reads it in blocks and evicts after each of them), and all tokens of the answer are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.scored_eviction import ScoredEviction, checked_prompt_budget
from kvc_trt.methods.full import DENSE
from kvc_trt.methods.rankings.ranking import ChosenList, PromptRanking, Prompts
from kvc_trt.methods.rankings.rounding import BoundedScores, Float64, off
from kvc_trt.operators.compaction.keydiff import COMPACT_KEYDIFF, COMPACT_KEYDIFF_OF_TURN

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted

_SHORTEST = 1e-12
"""Smallest length by which a key is divided (`reference.keydiff`)."""


@dataclass(frozen=True)
class ByDirection(PromptRanking):
    """Prompt tokens ranked by how far their keys point away from the mean direction of all keys."""

    @override
    def explain(self, inputs: Prompts, chosen: ChosenList, slack: float) -> str | None:
        """Judge the list by the keys alone."""
        return chosen.instead("kept", self.scores(inputs.keys_of(chosen), slack).unexplained(chosen.taken))

    def scores(self, keys: Float64, slack: float) -> BoundedScores:
        """Score how far each key [n, D] of one KV head points away from the mean direction of all of them.

        A unit vector is off by twice as much as its key, and so is the mean of all of them.
        """
        units = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), _SHORTEST)
        anchor = units.mean(0)
        error = off(slack) * (1 + np.linalg.norm(anchor))
        return BoundedScores.within(-(units @ anchor), np.full(len(keys), error))


class DistinctKeys(ScoredEviction):
    """Keep the keys that point away from the others, one list per KV head."""

    name = "keydiff"
    any_softmax = True
    operators = (COMPACT_KEYDIFF,)
    operator_of_stored = COMPACT_KEYDIFF_OF_TURN
    turn = "Stored and new tokens compete for the prompt budget: the keys that differ most from all of them stay."
    query_agnostic = True

    @override
    def compact(
        self, observed: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        return reference.keep_distinct(keys, values, prompt_lengths, prompt_budget=rule.prompt_budget)

    @override
    def describe(self, rule: Constants) -> str:
        return "those of the most distinct keys"

    @override
    def ranking(self, rule: Constants) -> ByDirection:
        """Return the ranking by direction."""
        return ByDirection()


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive prompt budget = token budget - new tokens."""
    prompt_budget = checked_prompt_budget(inputs, inputs.budget - inputs.max_output_len, least=1, least_is="1")
    return constants(
        inputs, DISTINCT_KEYS, DENSE,
        capacity=prompt_budget + inputs.max_output_len,
        prompt_budget=prompt_budget,
        window=1,
    )  # fmt: skip


DISTINCT_KEYS = DistinctKeys()
KEYDIFF = Policy(
    name="keydiff",
    summary="keep the prompt tokens of the most distinct keys, whatever will be asked, then attend densely",
    source="KeyDiff, arXiv 2504.15364",
    eviction=DISTINCT_KEYS,
    selection=DENSE,
    resolve=resolve,
    overrides=("prompt_budget", *EVERY_POLICY),
    candidate=True,
)
