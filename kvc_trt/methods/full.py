"""The whole cache, read at every step: what every policy is compared with. No budget, no deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.methods.constants import Constants
from kvc_trt.methods.graph_pieces import PromptLayer, StepLayer, store_whole
from kvc_trt.methods.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.kinds import DecodeSelection, PromptEviction
from kvc_trt.methods.parameters import BASELINE, PolicyParameters
from kvc_trt.methods.policy import Formula, Policy
from kvc_trt.operators.compact import COMPACT
from kvc_trt.operators.dense_attention import DENSE_ATTENTION

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted, LayerCache, Selection


class Nothing(PromptEviction):
    """Every token of every prompt stays."""

    name = "none"
    evicts = False

    def compact(
        self, observed: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        """Everything, in its order."""
        from kvc_trt import reference

        return reference.compact(observed, keys, values, prompt_lengths, prompt_budget=keys.shape[2], pool_kernel=1)

    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        """As it is; where a step needs page bounds, KvcCompact makes them: its budget is then the longest prompt."""
        if bounds:
            prompt.compact(COMPACT, bounds=True)
        else:
            store_whole(prompt)


class Dense(DecodeSelection):
    """A step attends to everything cached: also in skipped layers, and of policies that only evict from the prompt."""

    name = "dense"
    operators = (DENSE_ATTENTION,)

    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        """Attention over all entries."""
        from kvc_trt import reference

        return reference.Selection(reference.dense_attention(query, cache.keys, cache.values, cache.lengths))

    def decode(self, step: StepLayer) -> str:
        """KvcDenseAttention."""
        return step.attend(DENSE_ATTENTION, dense_until=step.batch.slice_until)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Room for the whole sequence; the token budget is the sequence whatever was asked."""
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
)
