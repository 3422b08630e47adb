"""Sliding window: the last `token_budget` tokens and nothing else; StreamingLLM without sinks (arXiv 2309.17453,
where it is the baseline "window attention").

Shapes and deviations are those of `streaming-llm`: prefill attention is exact, only the cache is windowed. Models that
were trained with a window of their own (Mistral 7B v0.1) are not meant here.
"""

from __future__ import annotations

from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.methods.request import EVERY_POLICY, Request
from kvc_trt.methods.streaming_llm import compact, keep_recent, select

__all__ = ["compact", "resolve", "select"]

SUMMARY = "baseline: keep the last tokens, drop one at every step"
SOURCE = "window attention, arXiv 2309.17453"
PROMPT_EVICTION = "recent"
DECODE_SELECTION = "recent"
OVERRIDES = ("recent", "positions", *EVERY_POLICY)


def resolve(request: Request) -> PolicyParameters:
    """The whole budget is recent tokens."""
    return keep_recent(request, 0)
