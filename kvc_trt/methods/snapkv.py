"""SnapKV as published: each query head keeps its own prompt tokens.

"SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, with the accounting of RocketKV's
appendix (arXiv 2502.14051): the prompt keeps (token budget - new tokens) / group tokens per query head, since the cache
holds one list per query head.

Shapes: keys and values are repeated to [B,H,C,D], so grouped-query attention saves nothing; with one query head per KV
head it equals `snapkv-gqa`. A turn of a conversation compacts stored and new tokens by the same rule, with one list
per query head. The default is max-pooling of width 7, as in the paper's LongBench runs; `pool_kind` avg and
`pool_kernel` 5 are the defaults of the released code. Deviations: scores are float32; a prompt of exactly the budget is
kept whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvc_trt import reference
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.graph_context import PromptLayer, TurnLayer, repeat_heads
from kvc_trt.methods.base.inputs import EVERY_POLICY, EVICTION, PolicyInputs
from kvc_trt.methods.base.isolated_runs import TurnRun
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import Entry, PromptEviction
from kvc_trt.methods.full import DENSE
from kvc_trt.methods.snapkv_gqa import TABLE_1, by_budget_or_share
from kvc_trt.methods.snapkv_plus_plus import OBSERVED_ATTENTION, ByWindow

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.operators.emitter import Value
    from kvc_trt.reference import Compacted, Turn
    from kvc_trt.reference.model.rules import PromptQueries


class ObservedPerQueryHead(PromptEviction):
    """Keep the tokens that the last queries attend to most, with one list and one cache per query head."""

    name = "snapkv"
    any_softmax = True
    operators = None
    turn = OBSERVED_ATTENTION.turn
    turn_state = OBSERVED_ATTENTION.turn_state
    cache_per_query_head = True

    @override
    def observe(self, queries: PromptQueries, prompt_lengths: Tensor, rule: Constants) -> Any:
        return queries.observed

    @override
    def compact(
        self, observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        """observed: queries [B,H,W,D]; keys, values [B,G,S,D] -> keys and values [B,H,C,D], one list per query head."""
        queries = observed.queries if isinstance(observed, reference.Observed) else observed
        shared = queries.shape[1] // keys.shape[1]
        keys, values = (table.repeat_interleave(shared, dim=1) for table in (keys, values))
        return OBSERVED_ATTENTION.compact(observed, keys, values, prompt_lengths, rule)

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        keys, values = (repeat_heads(prompt.emit, prompt.config, part) for part in (prompt.keys, prompt.values))
        operator = OBSERVED_ATTENTION.operators_of(prompt.rule)[0]
        replace(prompt, keys=keys, values=values).compact(operator, bounds=bounds)

    @override
    def new_entry(self, step: Entry) -> Entry:
        """Return the step or turn with keys and values repeated for every query head."""
        if isinstance(step, TurnLayer):
            keys, values = (repeat_heads(step.emit, step.config, part) for part in (step.keys, step.values))
            return replace(step, keys=keys, values=values)
        key, value = (repeat_heads(step.emit, step.config, part) for part in (step.key, step.value))
        return replace(step, key=key, value=value)

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        """Compact like the shared choice; the stored keys and values are repeated already."""
        return OBSERVED_ATTENTION.compact_turn(turn, rule)

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        return OBSERVED_ATTENTION.turn_runs()

    @override
    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        return OBSERVED_ATTENTION.extend(turn, bounds=bounds)

    @override
    def describe(self, rule: Constants) -> str:
        return OBSERVED_ATTENTION.describe(rule)

    @override
    def ranking(self, rule: Constants) -> ByWindow:
        """Return the ranking by the window's pooled attention."""
        return OBSERVED_ATTENTION.ranking(rule)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive prompt budget = (token budget - new tokens) / query heads per KV head, or the share of each prompt."""
    prompt_budget = (inputs.budget - inputs.max_output_len) // inputs.model.group_size
    parameters = by_budget_or_share(inputs, prompt_budget, OBSERVED_PER_QUERY_HEAD)
    return replace(parameters, per_query_head=True)


OBSERVED_PER_QUERY_HEAD = ObservedPerQueryHead()
SNAPKV = Policy(
    name="snapkv",
    summary="baseline: each query head keeps its own prompt tokens, the cache is repeated for all of them",
    source="SnapKV, arXiv 2404.14469",
    eviction=OBSERVED_PER_QUERY_HEAD,
    selection=DENSE,
    resolve=resolve,
    overrides=(*EVICTION, *EVERY_POLICY),
    published=TABLE_1,
)
