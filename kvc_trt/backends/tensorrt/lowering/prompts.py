"""Store whole prompts in a format by the plugin that compacts them.

KvcStoreTokens has no plugin. KvcCompact with a budget of the whole cache stores the same: no prompt is longer than its
cache, so no token competes and no query votes. Its body need not be in the graph, so this comes after the passes whose
graphs ONNX Runtime executes.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto

from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.schema import CACHE_FORMAT
from kvc_trt.operators.tensors import CAPACITY

UNREAD_PAGE = 64
"""Page size of the bounds, which the plugin returns and nothing reads."""


def store_prompts(model: ModelProto, at_hand: TensorRtInstallation) -> list[str]:
    """Replace every KvcStoreTokens by a KvcCompact that keeps everything."""
    stored = [node for node in model.graph.node if node.op_type == STORE_TOKENS.name]
    if not stored:
        return []
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        nodes += _compaction(node) if node.op_type == STORE_TOKENS.name else [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return [f"{len(stored)} x {STORE_TOKENS.name} as {COMPACT.name} that keeps everything"]


def _compaction(node: NodeProto) -> list[NodeProto]:
    """Return the nodes for (k, v [B,G,S,D], prompt_lengths [B]) -> the parts of a cache."""
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    own = STORE_TOKENS.for_numbers(numbers)
    keys, values, lengths = node.input
    emit = Emitter()
    with emit.scope(node.name):
        # A window must be there: one row, of as many heads as the keys. It has no vote.
        inputs = {"q_window": emit.Gather(keys, [0], axis=2), "k": keys, "v": values, "prompt_lengths": lengths}
        capacity = numbers[CAPACITY.name]
        parts = dict(zip((tensor.name for tensor in own.outputs), node.output, strict=True))
        unread = {name: f"{node.name}.{name}" for name in ("bounds", "cache_lengths", "indices")}
        COMPACT.call(
            emit, inputs, {**parts, **unread}, prompt_budget=capacity, capacity=capacity, pool_kernel=1,
            page_size=UNREAD_PAGE, fp8_bounds=1, cache_format=numbers[CACHE_FORMAT.name],
        )  # fmt: skip
    return emit.nodes
