"""Quest at a matched budget: the baseline of the RocketKV paper (arXiv 2502.14051, appendix A.3; Quest: 2406.10774).

A step spends half of the token budget t on scores and half on attention: pages of ceil(S/t) tokens are scored by all
channels of their bounds, the scores are accumulated over the query heads of a group, and the floor(t/2) best tokens are
read. That is hybrid attention with every channel, so it needs no new operator. A turn of a conversation attends exactly
to everything and is appended.

Deviations: the paper does not say how scores are accumulated; ours is hybrid attention's rule (the group shares the
sign of its summed query, mean over the group of each head's softmax over tokens), which for one query head per KV head
ranks pages as Quest does. The newest page competes like any other unless `recent` is set; dense when it fits; scores
are float32.
"""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.full import NOTHING
from kvc_trt.methods.hybrid import BEST_OF_PAGES, select_from_pages
from kvc_trt.methods.quest import TABLE_1


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive p = ceil(S/t), so that the S/p bound vectors are at most t vectors, or t/2 pairs."""
    page_size = inputs.value("page_size", -(-inputs.sequence // inputs.budget))
    parameters = select_from_pages(
        inputs, NOTHING, capacity=inputs.sequence, prompt_budget=inputs.max_input_len, pool_kernel=1
    )
    return replace(parameters, page_size=page_size, top_r=inputs.model.head_size)


QUEST_MATCHED = Policy(
    name="quest-matched",
    summary="score pages by all channels of their bounds, at the budget of the other methods",
    source="Quest, arXiv 2406.10774, as RocketKV's baseline",
    eviction=NOTHING,
    selection=BEST_OF_PAGES,
    resolve=resolve,
    overrides=("page_size", "top_k", "recent", "dense_until", "fp8_bounds", *EVERY_POLICY),
    published=TABLE_1,
)
