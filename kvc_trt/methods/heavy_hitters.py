"""H2O: the last tokens, and of the others those that have received most attention ("H2O: Heavy-Hitter Oracle for
Efficient Generative Inference of Large Language Models", arXiv 2306.14048, section 4).

Every entry of the cache carries the attention probability it has received so far, from all queries of the prompt and
of the answer. Half of the budget are the last tokens, the other half those of the largest sums. A step attends to all
that is cached, the new token included, adds its probabilities, and drops one token once the budget is exceeded.

Shapes: token budget + 1 entries per KV head, sums float32 [B,G,C], each KV head with its own entries. Deviations: the
sums of the query heads of a group are added up and the group shares one list (the released code has no grouped-query
attention); budgets are absolute (the released code's simulation takes shares of the prompt), sums are not divided by
the number of queries that saw an entry, positions are those of the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, Request, constants

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted, LayerCache, Selection

SUMMARY = "keep the last tokens and those that were attended to most, drop one at every step"
SOURCE = "H2O, arXiv 2306.14048"
PROMPT_EVICTION = "heavy-hitters"
DECODE_SELECTION = "heavy-hitters"
OVERRIDES = ("recent", *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """Half of the budget recent tokens, rounded up; one slot more than the budget."""
    budget = min(request.budget, request.sequence)
    recent = request.value("recent", budget - budget // 2)
    if recent > budget:
        raise InputError(
            f"the token budget is {budget}; expected at least the {recent} recent tokens",
            hint=f"--token-budget {recent}, or fewer --set recent=N",
        )
    return constants(
        request, "heavy-hitters", "heavy-hitters",
        capacity=budget + 1,
        prompt_budget=min(budget, request.max_input_len),
        window=request.max_input_len,
        recent=recent,
    )  # fmt: skip


def compact(
    q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
) -> Compacted:
    """The last tokens and the heavy hitters of every prompt longer than the budget; q_window is all queries."""
    from kvc_trt import reference

    shares = {"heavy": _heavy(parameters), "recent": parameters.recent}
    return reference.keep_heavy_hitters(q_window, keys, values, prompt_lengths, **shares)


def select(query: Tensor, cache: LayerCache, parameters: PolicyParameters) -> Selection:
    """Attend to everything cached, then drop what no longer fits the budget."""
    from kvc_trt import reference

    if cache.scores is None:
        raise ValueError("scores are missing; expected the attention received by every entry [B,G,C]")
    state = cache.keys, cache.values, cache.lengths, cache.scores
    return reference.heavy_hitter_attention(query, *state, heavy=_heavy(parameters), recent=parameters.recent)


def _heavy(parameters: PolicyParameters) -> int:
    """Entries that stay for what they received: the budget less the recent ones."""
    return parameters.capacity - parameters.spare_slots - parameters.recent
