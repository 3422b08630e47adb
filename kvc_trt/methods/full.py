"""The whole cache, read at every step: what every policy is compared with. No budget, no deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, Request, constants
from kvc_trt.methods.snapkv_plus_plus import select

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
    return constants(request, "none", "dense", capacity=request.sequence, token_budget=request.sequence)


def compact(
    q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
) -> Compacted:
    """Keep every token of every prompt."""
    from kvc_trt import reference

    return reference.compact(q_window, keys, values, prompt_lengths, prompt_budget=keys.shape[2], pool_kernel=1)
