"""The whole cache, read at every step: what every policy is compared with. No budget, no deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.policies.parameters import PolicyParameters
from kvc_trt.policies.request import DEFAULT_WINDOW, EVERY_POLICY, Request
from kvc_trt.policies.snapkv_plus_plus import select

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.reference import Compacted

__all__ = ["compact", "resolve", "select"]

SUMMARY = "keep every token, read every token"
SOURCE = "dense attention"
PROMPT_EVICTION = "none"
DECODE_SELECTION = "dense"
OVERRIDES = EVERY_POLICY


def resolve(request: Request) -> PolicyParameters:
    """Room for the whole sequence; the token budget is the sequence whatever was asked."""
    sequence = request.sequence
    return PolicyParameters(
        policy=request.policy,
        prompt_eviction="none",
        decode_selection="dense",
        token_budget=sequence,
        max_input_len=request.max_input_len,
        max_output_len=request.max_output_len,
        capacity=sequence,
        prompt_budget=request.max_input_len,
        window=DEFAULT_WINDOW,
        pool_kernel=1,
        page_size=1,
        top_r=request.model.head_size,
        top_k=sequence,
        dense_until=sequence,
        skip_layers=request.value("skip_layers", 0),
        split=request.split,
    )


def compact(
    q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
) -> Compacted:
    """Keep every token of every prompt."""
    from kvc_trt import reference

    return reference.compact(q_window, keys, values, prompt_lengths, prompt_budget=keys.shape[2], pool_kernel=1)
