"""What received most attention, and the last tokens: the cache of H2O, which also holds sums and positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import FunctionProto

from kvc_trt.graph.caches.prompt import PromptLayer
from kvc_trt.graph.caches.step import StepLayer, head_shape
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.operators import compact_heavy_hitters, heavy_hitter_attention
from kvc_trt.operators import function as functions
from kvc_trt.operators.emitter import Value

STATE = heavy_hitter_attention.STATE


def prefill(layers: Layers, prompt: PromptLayer, site: CacheSite) -> None:
    """KvcCompactHeavyHitters over all queries of the prompt."""
    rule = site.parameters
    names = [f"{kind}.{site.name}" for kind in (*STATE, "lengths", "indices")]
    functions.call(
        layers.emit, compact_heavy_hitters.NAME,
        [prompt.queries, prompt.keys, prompt.values, prompt.batch.lengths], names,
        prompt_budget=rule.capacity - rule.spare_slots, capacity=rule.capacity, recent=rule.recent,
    )  # fmt: skip


def decode(layers: Layers, step: StepLayer, site: CacheSite) -> Value:
    """KvcHeavyHitterAttention."""
    rule = site.parameters
    inputs = [step.query, step.key, step.value, *(f"{kind}.{site.name}" for kind in STATE)]
    functions.call(
        layers.emit, heavy_hitter_attention.NAME, [*inputs, step.lengths, step.batch.positions],
        [step.attended, *(f"{kind}_out.{site.name}" for kind in STATE)],
        capacity=rule.capacity, recent=rule.recent,
    )  # fmt: skip
    return step.attended


def bodies(layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
    """KvcHeavyHitterAttention and KvcCompactHeavyHitters."""
    shape = head_shape(layers.config, parameters)
    return {
        heavy_hitter_attention.NAME: lambda: heavy_hitter_attention.heavy_hitter_attention(shape),
        compact_heavy_hitters.NAME: compact_heavy_hitters.compact_heavy_hitters,
    }
