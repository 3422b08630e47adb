"""RocketKV: evict prompt tokens once (SnapKV++), then read only the most promising of the rest (hybrid attention).

"RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression", arXiv 2502.14051 (ICML 2025).
One token budget is divided so that both stages compress; docs/policies/rocketkv.md derives every number. After a turn
of a conversation, stored and new tokens compete for the prompt budget as SnapKV++ says.

Deviations: rounding follows the released accuracy code, which the paper leaves open; dense when it fits; float32
scores; the last prompt token belongs to prefill. `rocketkv` divides adaptively and chooses the pool kernel by length;
`rocketkv-v1` divides evenly (the first version's tables); `rocketkv-v2` is the released code's choice, kernel 63.
"""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.methods.base.inputs import BY_LENGTH, EVERY_POLICY, EVICTION, SELECTION, PolicyInputs
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Formula, Policy
from kvc_trt.methods.hybrid import BEST_OF_PAGES, select_from_pages
from kvc_trt.methods.snapkv_plus_plus import OBSERVED_ATTENTION, first_stage


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Divide the token budget between the two stages; a prompt budget set by hand changes the rest accordingly.

    Pages, channels and tokens read follow from the cache's capacity, so that no step reads more than the budget.
    """
    numbers = first_stage(inputs)
    kept = {name: numbers[name] for name in ("prompt_budget", "pool_kernel")}
    capacity = numbers["prompt_budget"] + inputs.max_output_len
    return replace(select_from_pages(inputs, OBSERVED_ATTENTION, capacity=capacity, **kept), **numbers)


ROCKETKV = Policy(
    name="rocketkv",
    summary="evict prompt tokens once, then read the most promising of the rest",
    source="RocketKV, arXiv 2502.14051",
    eviction=OBSERVED_ATTENTION,
    selection=BEST_OF_PAGES,
    resolve=resolve,
    overrides=(*EVICTION, *BY_LENGTH, *SELECTION, *EVERY_POLICY),
    divides=True,
    published=Formula(None, lambda c: 1 / c),
    candidate=True,
)
VERSION_1 = replace(
    ROCKETKV,
    name="rocketkv-v1",
    candidate=False,
    summary="rocketkv with the even split of the paper's first version",
    split="even",
    published=Formula(lambda c: c**-0.5 + 2 * c**-0.75, lambda c: 1 / c),
)
VERSION_2 = replace(
    ROCKETKV,
    name="rocketkv-v2",
    candidate=False,
    summary="rocketkv with pool kernel 63, as released",
    split="adaptive",
    fixed={"pool_kernel": 63},
)
