"""Inputs whose softmax weights end below float32's normal range, and graphs that make 0 of such weights.

Some processors and libraries keep subnormal numbers and some do not; here the difference is written into the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from kvc_trt.backends.harness import EngineOperator
from kvc_trt.engine import EngineDirectory
from kvc_trt.graph.state import cache_sites
from kvc_trt.methods.base.isolated_runs import PromptCase, StepCase, TurnCase
from kvc_trt.methods.base.registry import prompt_runs, step_runs, turn_runs
from kvc_trt.models.config import ModelConfig
from kvc_trt.policies import PolicyParameters
from kvc_trt.verify.rungs.operators import model_of

LENGTH = 220
"""Tokens of a prompt: close to a whole number of turns of 2 pi, so that expected queries point where queries do."""
SLOTS = 256
STORED, NEW = 5, 120
"""Tokens before a turn, and in it."""
LOWEST_NORMAL = -70.0
"""The lowest logit whose weight is not below float32's normal range."""


POLICIES = {
    "rocketkv": {}, "pyramidkv": {"window": 16, "token_budget": 128}, "snapkv": {"window": 16, "token_budget": 224},
    "rocketkv, budgets by prompt": {"layer_budget": "squeeze-online", "token_budget": 32, "window": 16}, "tova": {},
    "h2o": {},
    "expected-attention": {"token_budget": 96},
    "snapkv-gqa, averages": {"token_budget": 96, "window": 16, "pool_kind": "avg"},
}  # fmt: skip
"""Every kind of eviction and selection that ranks by softmax weights, with settings of `parameters_for`."""
RANKING = {
    "KvcCompact", "KvcCompactTurn", "KvcHybridAttention", "KvcCompactRanked", "KvcTrim", "KvcCompactTova",
    "KvcTovaAttention", "KvcCompactHeavyHitters", "KvcHeavyHitterAttention", "KvcCompactHeavyHittersOfTurn",
    "KvcCompactExpectedAttention", "KvcCompactAverage", "KvcCompactAverageTurn",
}  # fmt: skip
"""The operators of `POLICIES` that rank by these weights."""


def flush(name: str, model: ModelProto) -> None:
    """Let every softmax of a graph give 0 where its weight is below 2^-126; `name` is the graph's, and not needed."""
    for function in model.functions:
        _flush_nodes(function.node, [0])
    _flush_nodes(model.graph.node, [0])


def _flush_nodes(nodes, count: list[int]) -> None:
    rewritten = []
    for node in nodes:
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _flush_nodes(graph.node, count)
        rewritten += _flushed(node, count) if node.op_type == "Softmax" else [node]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in rewritten]
    del nodes[:]
    nodes.extend(copies)


def _flushed(node: NodeProto, count: list[int]) -> Iterator[NodeProto]:
    result, prefix = node.output[0], f"flush.{count[0]}"
    count[0] += 1
    node.output[0] = f"{prefix}.weights"
    yield node
    for name, value in (("smallest", 2.0**-126), ("zero", 0.0)):
        tensor = numpy_helper.from_array(np.array(value, np.float32))
        yield helper.make_node("Constant", [], [f"{prefix}.{name}"], value=tensor)
    yield helper.make_node("Less", [node.output[0], f"{prefix}.smallest"], [f"{prefix}.small"])
    yield helper.make_node("Where", [f"{prefix}.small", f"{prefix}.zero", node.output[0]], [result])


def logits_of(seed: int, tokens: int, run: int = 1) -> np.ndarray:
    """Logits [tokens], equal in runs of `run`: the first token's is 0, four are normal, the rest underflow.

    exp(-87.3) is float32's smallest normal number, and exp(-103.3) its smallest of all."""
    rng = np.random.default_rng(seed)
    runs = -(-tokens // run)
    logits = rng.uniform(-103, -88, runs)
    places = 1 + rng.permutation(runs // 2)[:4]
    logits[places] = -2, -4, -60, LOWEST_NORMAL
    logits[0] = 0
    return np.repeat(logits, run)[:tokens]


@dataclass
class Underflowing:
    """Cases for one cache's constants: queries point along channel 0, on which keys have their logit."""

    model: ModelConfig
    rule: PolicyParameters
    seed: int = 0

    def prompt(self, strength: float = 1.0) -> PromptCase:
        """Return a prompt; its queries are `strength` times as large."""
        window = self.rule.window if self.rule.window < SLOTS else 8
        keys, values = self._entries(SLOTS, logits_of(self.seed, LENGTH))
        queries = self._queries(window)
        queries[..., 0] *= strength
        return PromptCase("underflow", False, queries, keys, values, np.array([LENGTH]))

    def step(self) -> StepCase:
        """Return a step that fills the cache."""
        slots = self.rule.capacity
        keys, values = self._entries(slots, logits_of(self.seed, slots, max(1, self.rule.page_size)))
        new = [table[:, :, -1].copy() for table in (keys, values)]
        keys[:, :, -1] = values[:, :, -1] = 0
        return StepCase("underflow", False, self._queries(1)[:, :, 0], *new, keys, values, np.array([slots - 1]))

    def turn(self) -> TurnCase:
        """Return a turn of NEW tokens after STORED ones."""
        keys, values = self._entries(STORED + NEW, logits_of(self.seed, STORED + NEW))
        caches = [np.zeros((*keys.shape[:2], self.rule.capacity, keys.shape[3]), np.float32) for _ in range(2)]
        for cache, table in zip(caches, (keys, values), strict=True):
            cache[:, :, :STORED] = table[:, :, :STORED]
        blocks = [np.ascontiguousarray(table[:, :, STORED:]) for table in (keys, values)]
        lengths = np.array([STORED]), np.array([NEW])
        return TurnCase("underflow", False, self._queries(NEW), *blocks, *caches, *lengths)

    def _queries(self, count: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 1])
        size = self.model.head_size
        queries = rng.normal(0, 0.2, (1, self.model.num_attention_heads, count, size)).astype(np.float32)
        queries[..., 0] = size
        return queries

    def _entries(self, slots: int, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values [1,G,slots,D], zero after the logits' tokens."""
        rng = np.random.default_rng([self.seed, 2])
        shape = (1, self.model.num_key_value_heads, slots, self.model.head_size)
        keys, values = (rng.normal(0, scale, shape).astype(np.float32) for scale in (0.2, 1))
        keys[:, :, : logits.size, 0] = logits / np.sqrt(self.model.head_size)
        keys[:, :, logits.size :] = values[:, :, logits.size :] = 0
        return keys, values


def underflowing(
    operators: list[EngineOperator], engine: EngineDirectory
) -> Iterator[tuple[EngineOperator, PromptCase | StepCase | TurnCase, PolicyParameters]]:
    """Yield every operator of an engine that ranks by softmax weights, with a case and its cache's constants."""
    sites = cache_sites(engine.model, engine.parameters)
    for operator in operators:
        if operator.name not in RANKING:
            continue
        site = sites[operator.cache or 0]
        made, name = Underflowing(model_of(engine.model, site), site.parameters), operator.name
        if name in turn_runs():
            yield operator, made.turn(), site.parameters
        elif name in prompt_runs():
            # The run alone turns the expected queries, and makes them shorter by this.
            yield operator, made.prompt(1 / 0.7 if "Expected" in name else 1.0), site.parameters
        else:
            assert name in step_runs()
            yield operator, made.step(), site.parameters


def place_of_lowest_normal(case: PromptCase | StepCase | TurnCase, rule: PolicyParameters) -> tuple[int, int]:
    """Return the first token with that logit, and the number of tokens that share a score in such a case."""
    size = max(1, rule.page_size) if isinstance(case, StepCase) else 1
    tokens = {PromptCase: LENGTH, StepCase: rule.capacity, TurnCase: STORED + NEW}[type(case)]
    return int(np.flatnonzero(logits_of(0, tokens, size) == LOWEST_NORMAL)[0]), size


def nothing_received(self, keys, values, lengths, rule) -> dict[str, np.ndarray]:
    """Return the state of H2O's caches before anything was attended to, in place of its random scores."""
    slots = np.broadcast_to(np.arange(keys.shape[2]), keys.shape[:3])
    positions = np.where(slots < np.asarray(lengths)[:, None, None], slots, -1).astype(np.int32)
    return {"scores": np.zeros(slots.shape, np.float32), "slot_positions": positions}
