"""KeyDiff, then pages: keep the prompt tokens of the most distinct keys, and read the most promising of them.

KeyDiff (arXiv 2504.15364) chooses without queries, so any question may follow; RocketKV's second stage (arXiv
2502.14051) lets a step read a part of what is kept. No paper has both, so there is nothing to deviate from.
"""

from dataclasses import replace

from kvc_trt.methods.hybrid import HYBRID, select_from_pages
from kvc_trt.methods.keydiff import DISTINCT_KEYS


def resolve(inputs):
    """Keep four times the tokens that a step may read."""
    kept = min(4 * inputs.budget, inputs.max_input_len)
    capacity = kept + inputs.max_output_len
    return select_from_pages(inputs, DISTINCT_KEYS, capacity=capacity, prompt_budget=kept, pool_kernel=1)


POLICY = replace(
    HYBRID,
    name="keydiff-hybrid",
    summary="keep the prompt tokens of the most distinct keys, then read the most promising of them",
    source="KeyDiff, arXiv 2504.15364, and RocketKV stage 2, arXiv 2502.14051",
    eviction=DISTINCT_KEYS,
    resolve=resolve,
    published=None,
)
