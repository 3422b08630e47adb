"""Find the parts of a policy that have kernels, and those that run as PyTorch operations (decision 0026)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kvc_trt.engine.missing import missing_kernel_of_caches
from kvc_trt.methods.base.graph_context import softmax_of
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.operators.schema import Operator


@dataclass(frozen=True)
class PolicyPath:
    """The parts of a policy that have kernels, if some part has none: prompts and turns then run node by node.

    The bodies of operators without a kernel run as PyTorch operations.
    """

    policy: str
    eviction: bool
    """True if prompt eviction has kernels."""
    steps: bool
    """True if decode steps have kernels."""
    plain_steps: bool
    """True if each layer's step is one kernel, which is called as under a policy that has all kernels."""

    def __str__(self) -> str:
        lacking = [
            *(() if self.eviction else ("prompt eviction",)), *(() if self.steps else ("selection and attention",))
        ]  # fmt: skip
        if not lacking:
            return f"{self.policy}: kernels, called one by one between PyTorch operations"
        verb = "runs" if self.steps else "run"
        return f"{self.policy}: {', '.join(lacking)} {verb} as PyTorch operations, no kernel of ours"


@lru_cache(maxsize=64)
def lacks_kernels(model: ModelConfig, parameters: PolicyParameters) -> bool:
    """Return whether some part of an engine's caches has no kernel, without writing the nodes that run then."""
    return missing_kernel_of_caches(parameters, model.num_hidden_layers) is not None or bool(softmax_of(model).code)


@lru_cache(maxsize=64)
def policy_path(model: ModelConfig, parameters: PolicyParameters) -> PolicyPath | None:
    """Return which parts of a policy have kernels, which needs the package onnx; None, without it, if all have."""
    if not lacks_kernels(model, parameters):
        return None
    layers = model.cached_layers
    from kvc_trt.graph.cache_graphs import CacheGraphs, called_operators

    graphs = CacheGraphs(model, parameters)
    # Storing a prompt in a format is no part of its eviction; the kernel that appends a block does it.
    prompts = {
        layer: [one for one in called_operators(graphs.prompt(layer)) if one is not STORE_TOKENS] for layer in layers
    }
    evicting = [layer for layer in layers if any(g.parameters.eviction.evicts for g in parameters.groups(layer))]
    return PolicyPath(
        parameters.policy,
        eviction=all(_has_kernels(called) for called in prompts.values()) and all(prompts[one] for one in evicting),
        steps=all(_has_kernels(called_operators(graphs.step(layer))) for layer in layers),
        plain_steps=all(
            (one := graphs.step_operator(layer)) is not None and one.kernel is not None for layer in layers
        ),
    )


def _has_kernels(operators: Sequence[Operator]) -> bool:
    return all(_has_kernel(operator) for operator in operators)


def _has_kernel(operator: Operator | None) -> bool:
    return operator is not None and operator.kernel is not None
