"""Sliding window: the last `token_budget` tokens and nothing else; StreamingLLM without sinks (arXiv 2309.17453,
where it is the baseline "window attention").

Also the eviction of layers that a model lets slide (`LayerWindow`), under any policy.

After a turn of a conversation, the last tokens of stored and new ones stay.

Shapes and deviations are those of `streaming-llm`: prefill attention is exact, only the cache is windowed. This is not
the sliding window that some models are trained with (Mistral 7B v0.1, Gemma 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs
from kvc_trt.methods.base.isolated_runs import Array, Found, RunnableAlone, TurnCase, TurnRun, float32, sinks_of
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.streaming_llm import FIRST_AND_LAST, RING, FirstAndLast, keep_recent
from kvc_trt.operators.turns.extend_sliding import EXTEND_SLIDING_ATTENTION

if TYPE_CHECKING:
    from kvc_trt.methods.base.graph_context import TurnLayer
    from kvc_trt.operators.emitter import Value


class LayerWindow(FirstAndLast):
    """Keep the window of a layer that the model lets slide; a turn's tokens see the same window as in the model."""

    name = "layer-window"
    slides = True
    turn = "The window of each sliding layer stays."

    @override
    def _attend(self, turn: TurnLayer, tables: Mapping[str, Value], stored: Value) -> Value:
        inputs = {"q": turn.queries, **tables, "cache_lengths": turn.entries}
        return turn.call(EXTEND_SLIDING_ATTENTION, inputs, {"o": f"attended.{turn.name}"})["o"]

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        return {**super().turn_runs(), EXTEND_SLIDING_ATTENTION.name: _run_turn}


def _run_turn(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    """Run KvcExtendSlidingAttention while the ring fills and after it has wrapped; the reference has it in order."""
    import torch

    found = Found()
    for turned in (0, rule.capacity + 3):
        before = case.cache_lengths + turned
        stored = np.minimum(before, rule.capacity)
        both = replace(case, cache_lengths=stored).joined(1)
        (result,) = operator.run(q=case.q, k=both.k, v=both.v, cache_lengths=before, **sinks_of(case))
        keys, values = (float32(_in_order(table, before, rule.capacity)) for table in (both.k, both.v))
        used, new = torch.from_numpy(stored), torch.from_numpy(case.lengths)
        given: dict[str, Any] = {"window": rule.capacity, "softmax": case.softmax}
        expected = reference.extend_attention(float32(case.q), keys, values, used, new, **given).numpy()
        real = (np.arange(case.q.shape[2]) < case.lengths[:, None])[:, None, :, None]
        found += Found(computed=((np.where(real, result, 0).astype(result.dtype), expected),))
    return found


def _in_order(table: Array, stored: Array, slots: int) -> Array:
    """Return a ring and the tokens behind it [B,G,T,D] in the order of the text; `stored` [B] were ever stored."""
    ordered: Array = table.copy()
    for row, count in enumerate(stored):
        if count > slots:
            ordered[row, :, :slots] = np.roll(table[row, :, :slots], -(count % slots), axis=1)
    return ordered


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Use the whole budget for recent tokens."""
    return keep_recent(inputs, 0)


LAYER_WINDOW = LayerWindow()
SLIDING_WINDOW = Policy(
    name="sliding-window",
    summary="baseline: keep the last tokens, drop one at every step",
    source="window attention, arXiv 2309.17453",
    eviction=FIRST_AND_LAST,
    selection=RING,
    resolve=resolve,
    overrides=("recent", "positions", *EVERY_POLICY),
)
