"""SnapKV with one shared list per KV head: the baseline that spends the whole budget on eviction.

"SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, with the grouped accounting of
RocketKV's appendix: the prompt keeps the token budget less the tokens that will be generated, so a step reads at
most the budget. After a turn of a conversation, stored and new tokens compete for the prompt budget by the same rule.

Deviations from SnapKV: the votes of a group are summed before pooling and the cache keeps its KV heads (the original
selects per query head and repeats keys and values, which multiplies the cache by the group size). Max-pooling of width
7, unless `pool_kind` and `pool_kernel` are set.
"""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.methods.base.inputs import DEFAULT_WINDOW, EVERY_POLICY, EVICTION, PolicyInputs
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Formula, Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.base.token_budget import budgets_by_share
from kvc_trt.methods.full import DENSE
from kvc_trt.methods.snapkv_plus_plus import OBSERVED_ATTENTION, evict_then_dense

POOL_KERNEL = 7
TABLE_1 = Formula(lambda c: 1 / c, lambda c: 1 / c)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive prompt budget = token budget - new tokens, or the share of each prompt that the budget names."""
    return by_budget_or_share(inputs, inputs.budget - inputs.max_output_len)


def by_budget_or_share(inputs: PolicyInputs, derived: int, eviction: PromptEviction | None = None) -> PolicyParameters:
    """Return SnapKV's parameters: every prompt keeps `derived` tokens, or its own share if the budget is in percent.

    By eq. 3 a prompt of n tokens keeps floor(p (n - window)) tokens before the window, which stays beside them. Layer
    budgets divide one number for all prompts, the longest prompt's share; a prompt budget set by hand replaces it.
    """
    if inputs.share is None:
        return evict_then_dense(inputs, derived, POOL_KERNEL, eviction)
    window = inputs.value("window", DEFAULT_WINDOW)
    most = int(budgets_by_share(inputs.max_input_len, inputs.share, window)[-1])
    parameters = evict_then_dense(inputs, most, POOL_KERNEL, eviction)
    if "prompt_budget" in inputs.overrides or inputs.choice("layer_budget", "uniform") != "uniform":
        return parameters
    return replace(parameters, by_length=True, prompt_share=inputs.share)


SNAPKV_GQA = Policy(
    name="snapkv-gqa",
    summary="baseline: keep the budget's worth of prompt tokens, then attend densely",
    source="SnapKV, arXiv 2404.14469",
    eviction=OBSERVED_ATTENTION,
    selection=DENSE,
    resolve=resolve,
    overrides=(*EVICTION, *EVERY_POLICY),
    published=TABLE_1,
    candidate=True,
)
