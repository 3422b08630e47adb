"""StreamingLLM: the first tokens of a text and its last ones ("Efficient Streaming Language Models with Attention
Sinks", arXiv 2309.17453, section 3).

`sinks` first tokens stay for ever, beside them the last `token_budget - sinks`; each step drops the oldest of these
once the budget is used up, so memory does not grow with the answer. A step attends to all that is cached.

Shapes: a cache holds min(token budget, longest sequence) entries per KV head, equal for all of them. Deviations:
positions="original" is the default: keys are stored after the rotary embedding at their places in the text, as in
DuoAttention. positions="cache" is the paper's form: keys are stored before it and rotated at every step by their rank
among what is cached. Prefill attention is exact, not windowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, Request, constants
from kvc_trt.methods.snapkv_plus_plus import select

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted

__all__ = ["compact", "resolve", "select"]

SUMMARY = "keep the first tokens and the last ones, drop one at every step"
SOURCE = "StreamingLLM, arXiv 2309.17453"
PROMPT_EVICTION = "recent"
DECODE_SELECTION = "recent"
OVERRIDES = ("sinks", "recent", "positions", *EVERY_POLICY)
SINKS = 4


def resolve(request: Request) -> PolicyParameters:
    """Four sinks unless told otherwise; the rest of the budget is recent tokens."""
    return keep_recent(request, request.value("sinks", SINKS))


def keep_recent(request: Request, sinks: int) -> PolicyParameters:
    """Parameters of a cache of `sinks` first tokens and as many last ones as the budget still holds."""
    recent = request.value("recent", max(1, request.budget - sinks))
    if sinks + recent > request.budget:
        raise InputError(
            f"the token budget is {request.budget}; expected at least {sinks + recent}: {sinks} sinks and {recent} "
            f"recent token{'s' * (recent > 1)}",
            hint=f"--token-budget {sinks + recent}",
        )
    capacity = min(sinks + recent, request.sequence)
    return constants(
        request, "recent", "recent",
        capacity=capacity,
        prompt_budget=min(capacity, request.max_input_len),
        window=1,
        sinks=min(sinks, capacity - 1),
        recent=recent,
        positions=request.choice("positions", "original"),
    )  # fmt: skip


def compact(
    q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
) -> Compacted:
    """The sinks and the last tokens of every prompt that is longer than the cache; queries are not looked at."""
    from kvc_trt import reference

    slots, sinks = parameters.capacity, parameters.sinks
    return reference.keep_recent(keys, values, prompt_lengths, slots=slots, sinks=sinks)
