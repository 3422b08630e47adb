"""Hybrid attention: RocketKV's second stage alone, on the whole cache (arXiv 2502.14051, section 3.3).

Each step scores pages of consecutive slots from their key bounds on the query's largest channels, then attends exactly
to `top_k` tokens of the best pages; a row that fits the token budget is attended densely. A turn of a conversation
attends exactly to everything and is appended.

Deviations: dense when it fits (the released code attends to half the budget even then); pages count over the cache
from slot 0; empty slots of a partial page are +-inf (TensorRT-LLM: 0); a channel sum of exactly 0 takes the minimum;
scores are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.inputs import DEFAULT_WINDOW, EVERY_POLICY, SELECTION, PolicyInputs, constants
from kvc_trt.methods.base.isolated_runs import ByPages
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.base.rocketkv_budget import default_channels, default_page_size
from kvc_trt.methods.full import NOTHING
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import LayerCache, Selection


class BestOfPages(DecodeSelection):
    """Select the best tokens by the bounds of their pages on the query's largest channels."""

    name = "hybrid"
    operators = (HYBRID_ATTENTION,)
    reads_a_part = True

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        from kvc_trt import reference

        if cache.page_min is None or cache.page_max is None:
            raise ValueError("page_min and page_max are missing; expected the bounds of every page [B,G,P,D]")
        read = reference.hybrid_attention(
            query, cache.keys, cache.values, cache.lengths, cache.page_min, cache.page_max,
            page_size=rule.page_size, top_r=rule.top_r, top_k=rule.top_k,
            token_budget=rule.token_budget, dense_until=rule.dense_until,
        )  # fmt: skip
        return reference.Selection(*read)

    @override
    def pairs_to_choose(self, rule: Constants, entries: int, head_size: int) -> float:
        """Count `top_r` channels of one bound of every page."""
        return -(-entries // rule.page_size) * rule.top_r / (2 * head_size)

    @override
    def describe(self, rule: Constants) -> str:
        bounds = ", bounds in fp8" if rule.fp8_bounds else ""
        return f"page size {rule.page_size}, {rule.top_r} channels{bounds}"

    def ranking(self, rule: Constants) -> ByPages:
        """Return the ranking by pages and their channels."""
        return ByPages(rule.page_size, rule.top_r, rule.fp8_bounds)


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Let the decode step do all of the compression: larger pages and fewer channels than RocketKV."""
    return select_from_pages(
        inputs, NOTHING, capacity=inputs.sequence, prompt_budget=inputs.max_input_len, pool_kernel=1
    )


def select_from_pages(
    inputs: PolicyInputs, eviction: PromptEviction, *, capacity: int, prompt_budget: int, pool_kernel: int
) -> PolicyParameters:
    """Return the parameters of hybrid attention over a cache of `capacity` slots."""
    page_size = inputs.value("page_size", default_page_size(capacity, inputs.budget))
    channels = default_channels(capacity, inputs.budget, page_size, inputs.model.head_size)
    return constants(
        inputs, eviction, BEST_OF_PAGES,
        capacity=capacity,
        prompt_budget=prompt_budget,
        window=inputs.value("window", DEFAULT_WINDOW),
        pool_kernel=pool_kernel,
        page_size=page_size,
        top_r=inputs.value("top_r", channels),
        top_k=inputs.value("top_k", inputs.budget // 2),
        dense_until=inputs.value("dense_until", inputs.budget),
    )  # fmt: skip


BEST_OF_PAGES = BestOfPages()
HYBRID = Policy(
    name="hybrid",
    summary="keep every token, read the most promising ones",
    source="RocketKV stage 2, arXiv 2502.14051",
    eviction=NOTHING,
    selection=BEST_OF_PAGES,
    resolve=resolve,
    overrides=(*SELECTION, *EVERY_POLICY),
)
