"""SnapKV++: RocketKV's first stage alone (arXiv 2502.14051, section 3.2).

After prefill, each KV head keeps the `prompt_budget` prompt tokens that the last `window` queries look at most, votes
summed over the query heads of its group and spread to neighbours by max-pooling; generated tokens are never evicted. A
step attends densely to what is left.

Deviations: the prompt budget is the one RocketKV would use for the same token budget, so a step reads the whole
compressed cache, which is more than the token budget says. Scores are float32 (released: float16), the softmax includes
the causal window (the paper's text can be read either way, the released code includes it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.methods.budget import cache_capacity
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.pool_kernel import auto_pool_kernel
from kvc_trt.methods.request import DEFAULT_WINDOW, EVERY_POLICY, EVICTION, Request, constants

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted, LayerCache, Selection

SUMMARY = "evict prompt tokens once, then attend densely to the rest"
SOURCE = "RocketKV stage 1, arXiv 2502.14051"
PROMPT_EVICTION = "snapkv++"
DECODE_SELECTION = "dense"
OVERRIDES = (*EVICTION, *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """RocketKV's prompt budget, dense decoding."""
    capacity = cache_capacity(request.sequence, request.budget, request.max_output_len, request.split)
    pool_kernel = auto_pool_kernel(request.model, request.max_input_len)
    return evict_then_dense(request, capacity - request.max_output_len, pool_kernel)


def evict_then_dense(request: Request, prompt_budget: int, pool_kernel: int) -> PolicyParameters:
    """Parameters of any method that keeps `prompt_budget` prompt tokens and reads all that is cached."""
    prompt_budget = checked_prompt_budget(request, prompt_budget)
    return constants(
        request, "snapkv++", "dense",
        capacity=prompt_budget + request.max_output_len,
        prompt_budget=prompt_budget,
        window=request.value("window", DEFAULT_WINDOW),
        pool_kernel=request.value("pool_kernel", pool_kernel),
    )  # fmt: skip


def checked_prompt_budget(request: Request, derived: int) -> int:
    """The prompt budget in force, at most the longest prompt; InputError if a prompt's window would not fit in it."""
    budget = min(request.value("prompt_budget", derived), request.max_input_len)
    window = request.value("window", DEFAULT_WINDOW)
    if budget < min(window, request.max_input_len):
        raise InputError(
            f"the prompt budget is {budget} tokens (token budget {request.budget}, new {request.max_output_len}); "
            f"expected at least the observation window of {window}",
            hint="raise --token-budget, lower --max-output-len, or --set window=N",
        )
    return budget


def compact(
    q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
) -> Compacted:
    """Keep the prompt budget of every row that is longer."""
    from kvc_trt import reference

    budget, kernel = parameters.prompt_budget, parameters.pool_kernel
    return reference.compact(q_window, keys, values, prompt_lengths, prompt_budget=budget, pool_kernel=kernel)


def select(query: Tensor, cache: LayerCache, parameters: PolicyParameters) -> Selection:
    """Attend to everything cached."""
    from kvc_trt import reference

    return reference.Selection(reference.dense_attention(query, cache.keys, cache.values, cache.lengths))
