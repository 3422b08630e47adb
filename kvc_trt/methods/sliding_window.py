"""Sliding window: the last `token_budget` tokens and nothing else; StreamingLLM without sinks (arXiv 2309.17453,
where it is the baseline "window attention").

After a turn of a conversation, the last tokens of stored and new ones stay.

Shapes and deviations are those of `streaming-llm`: prefill attention is exact, only the cache is windowed. This is not
the sliding window that some models are trained with (Mistral 7B v0.1).
"""

from __future__ import annotations

from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.streaming_llm import FIRST_AND_LAST, RING, keep_recent


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Use the whole budget for recent tokens."""
    return keep_recent(inputs, 0)


SLIDING_WINDOW = Policy(
    name="sliding-window",
    summary="baseline: keep the last tokens, drop one at every step",
    source="window attention, arXiv 2309.17453",
    eviction=FIRST_AND_LAST,
    selection=RING,
    resolve=resolve,
    overrides=("recent", "positions", *EVERY_POLICY),
)
