"""RocketKV: evict prompt tokens once (SnapKV++), then read only the most promising of the rest (hybrid attention).

"RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression", arXiv 2502.14051 (ICML 2025).
One token budget is divided so that both stages compress; docs/policies/rocketkv.md derives every number.

Deviations: rounding follows the released accuracy code, which the paper leaves open; dense when it fits; float32
scores; the last prompt token belongs to prefill. `rocketkv` divides adaptively and chooses the pool kernel by length;
`rocketkv-v1` divides evenly (the first version's tables); `rocketkv-v2` is the released code's choice, kernel 63.
"""

from __future__ import annotations

from kvc_trt.methods.budget import cache_capacity
from kvc_trt.methods.hybrid import select, select_from_pages
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.pool_kernel import auto_pool_kernel
from kvc_trt.methods.request import EVERY_POLICY, EVICTION, SELECTION, Request
from kvc_trt.methods.snapkv_plus_plus import checked_prompt_budget, compact

__all__ = ["compact", "resolve", "select"]

SUMMARY = "evict prompt tokens once, then read the most promising of the rest"
SOURCE = "RocketKV, arXiv 2502.14051"
PROMPT_EVICTION = "snapkv++"
DECODE_SELECTION = "hybrid"
OVERRIDES = (*EVICTION, *SELECTION, *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """Divide the token budget between the two stages; a prompt budget given by hand moves the rest with it."""
    capacity = cache_capacity(request.sequence, request.budget, request.max_output_len, request.split)
    prompt_budget = checked_prompt_budget(request, capacity - request.max_output_len)
    return select_from_pages(
        request,
        "snapkv++",
        capacity=prompt_budget + request.max_output_len,
        prompt_budget=prompt_budget,
        pool_kernel=request.value("pool_kernel", auto_pool_kernel(request.model, request.max_input_len)),
    )
