"""PyramidKV: early layers keep much of the prompt, late layers little; the mean budget is SnapKV's.

"PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", arXiv 2406.02069. Budgets fall
linearly from the first layer to the last: with C tokens per layer on average, a window of W and beta = 20, the last
layer keeps (C - W) div beta besides its window, and the first as many as make the mean C. After a turn of a
conversation, stored and new tokens compete for the layer's budget by SnapKV's rule.

Shapes and selection are `snapkv-gqa`'s. Deviations: one list per KV head (the original repeats keys and values for
each query head); budgets are set for the longest prompt of an engine, not for each prompt; the step is rounded down as
in the released code, which makes the narrow end wider: up to (L - 2) / 2 tokens per layer above C.
"""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.methods.base.inputs import EVERY_POLICY, EVICTION, PolicyInputs
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.full import DENSE
from kvc_trt.methods.snapkv_gqa import POOL_KERNEL
from kvc_trt.methods.snapkv_plus_plus import OBSERVED_ATTENTION, evict_then_dense

BETA = 20


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Let layer l keep high - l * step besides its window; the mean is the token budget less the new tokens."""
    uniform = evict_then_dense(inputs, inputs.budget - inputs.max_output_len, POOL_KERNEL)
    budgets = layer_budgets(uniform.prompt_budget, uniform.window, inputs.model.num_hidden_layers, inputs.max_input_len)
    return replace(uniform, layer_budgets=budgets)


def layer_budgets(mean: int, window: int, layers: int, prompt: int) -> tuple[int, ...]:
    """Return the prompt budgets of all layers, window included; uniform if the prompt is too short for a pyramid."""
    free, rest = mean - window, prompt - window
    if prompt < 2 * free or layers == 1:
        return (mean,) * layers
    low = free // BETA
    high = 2 * free - low
    if high >= rest:
        low, high = 2 * free - rest, rest
    step = (high - low) // (layers - 1)
    return tuple(high - layer * step + window for layer in range(layers))


PYRAMIDKV = Policy(
    name="pyramidkv",
    summary="baseline: SnapKV with budgets that shrink from layer to layer",
    source="PyramidKV, arXiv 2406.02069",
    eviction=OBSERVED_ATTENTION,
    selection=DENSE,
    resolve=resolve,
    overrides=(*EVICTION, *EVERY_POLICY),
    candidate=True,
)
