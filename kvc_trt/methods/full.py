"""Keep and read the whole cache: the baseline for every policy. No budget, no deviations.

A turn of a conversation appends its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvc_trt import reference
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.graph_context import PromptLayer, StepLayer, store_whole
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.base.parameters import BASELINE, PolicyParameters
from kvc_trt.methods.base.policy import Formula, Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted, LayerCache, Selection


class Nothing(PromptEviction):
    """Keep every token of every prompt."""

    name = "none"
    evicts = False
    any_softmax = True
    turn = (
        "Nothing is evicted: the tokens of a turn are appended, the cache grows, and a turn that finds no free slots "
        "is refused."
    )
    query_agnostic = True

    @override
    def compact(
        self, observed: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        return reference.compact(observed, keys, values, prompt_lengths, prompt_budget=keys.shape[2], pool_kernel=1)

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        """Store the whole prompt; if a step needs page bounds, KvcCompact writes them (with an unlimited budget)."""
        if bounds:
            prompt.compact(COMPACT, bounds=True)
        else:
            store_whole(prompt)


class Dense(DecodeSelection):
    """Attend to everything cached; also used in skipped layers and by policies that only evict prompt tokens."""

    name = "dense"
    any_softmax = True
    operators = (DENSE_ATTENTION,)

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        tables = cache.keys, cache.values, cache.lengths
        return reference.Selection(reference.dense_attention(query, *tables, softmax=cache.softmax))

    @override
    def decode(self, step: StepLayer) -> str:
        return step.attend(DENSE_ATTENTION, dense_until=step.batch.slice_until)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive room for the whole sequence; the token budget is always the sequence."""
    return constants(inputs, NOTHING, DENSE, capacity=inputs.sequence, token_budget=inputs.sequence)


NOTHING, DENSE = Nothing(), Dense()
FULL = Policy(
    name=BASELINE,
    summary="keep every token, read every token",
    source="dense attention",
    eviction=NOTHING,
    selection=DENSE,
    resolve=resolve,
    overrides=EVERY_POLICY,
    published=Formula(lambda c: 1.0, lambda c: 1.0),
    candidate=True,
)
