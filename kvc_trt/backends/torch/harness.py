"""Verify an engine's weights and parameters in PyTorch, with `torch.ops.kvc` in place of the graphs' operators.

So the kernels, on a GPU or emulated, run inside a whole model, and verification judges them like ONNX Runtime.
Operators take their constants from config.json; the engine's graphs are not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from kvc_trt.backends.harness import Array, EngineOperator, Harness, ObservedExecutor, StoredBlock, Watched
from kvc_trt.backends.torch.device import from_numpy, to_numpy
from kvc_trt.backends.torch.executor import TorchExecutor, kernel_device
from kvc_trt.backends.torch.model.linear_layers import LinearInputs, LinearRows, take_token, take_tokens
from kvc_trt.backends.torch.model.prompt_attention import prefill_attention
from kvc_trt.backends.torch.model.weights import TorchWeights
from kvc_trt.backends.torch.whole_prompts import store_whole
from kvc_trt.engine.program import twin_program
from kvc_trt.graph.state import CacheSite, cache_sites, uses_pages
from kvc_trt.kernels.loading import current_library
from kvc_trt.kernels.ops import call, numbers_of
from kvc_trt.methods.base.graph_context import of_token
from kvc_trt.models.weights import CONVOLUTION, DECAY, DECAY_BIAS
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS
from kvc_trt.operators.linear.delta_rule import DELTA_RULE
from kvc_trt.operators.linear.delta_step import DELTA_STEP
from kvc_trt.runtime.executor import Executor

if TYPE_CHECKING:
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models.cache_formats import CacheFormat
    from kvc_trt.models.config import Linear


@dataclass(frozen=True)
class TorchOperator:
    """One operator of `torch.ops.kvc` with an engine's constants."""

    name: str
    nodes: int
    body: Callable[..., tuple[Tensor, ...]]
    device: torch.device
    cache: int | None = None

    def run(self, **inputs: Array) -> list[Array]:
        """Return the outputs in the operator's order; caches are copied first."""
        copies = {name: from_numpy(np.array(value, order="C")).to(self.device) for name, value in inputs.items()}
        with torch.inference_mode():
            return [to_numpy(output) for output in self.body(**copies)]


class TorchHarness(Harness):
    """The engine through `TorchExecutor`, on the device of the kernel library in use."""

    def __init__(self, engine: EngineDirectory, options: RunOptions) -> None:
        self._engine, self._options = engine, options

    @property
    @override
    def truncates(self) -> bool:
        """Return whether the engine's caches are of 16 bits, on a GPU."""
        return kernel_device().type == "cuda" and self._engine.model.dtype != "float32"

    @override
    def open(self, expose: Collection[str] = ()) -> ObservedExecutor:
        """Open an executor of the engine's weights and state."""
        return TorchExecutor(self._engine, self._options, expose=expose, weights=self._weights)

    @override
    def open_twin(self) -> Executor:
        return TorchExecutor(twin_program(self._engine), self._options, weights=self._weights)

    @override
    def open_beside_twin(self) -> None:
        """Return None: the twin's steps run the same operations as the engine's."""

    @cached_property
    def _weights(self) -> TorchWeights:
        """The weights, loaded once and shared by all executors."""
        return TorchExecutor(self._engine).weights

    @override
    def operators(self) -> list[EngineOperator]:
        """Return each operator that a layer of this engine calls; of a step that rotates, the part after rotation."""
        layers, device = self._engine.model.cached_layers, kernel_device()
        parameters, form = self._engine.parameters, self._engine.parameters.cache_format
        paged = sum(uses_pages(parameters, layer) for layer in layers)
        counts: dict[str, tuple[int, Callable[..., tuple[Tensor, ...]]]] = {
            "KvcPrefillAttention": (len(layers), lambda q, k, v: (prefill_attention(q, k, v),)),
        }
        for operator, nodes in (
            (COMPACT, sum(map(parameters.is_compressed, layers))),
            (HYBRID_ATTENTION, paged),
            (DENSE_ATTENTION, len(layers) - paged),
        ):
            counts[operator.name] = nodes, partial(call, operator.in_format(form), numbers_of(operator, parameters))
        found = [TorchOperator(name, nodes, body, device) for name, (nodes, body) in counts.items() if nodes]
        stores = [] if form.keys is None else self._stores()
        return [*found, *stores, *self._linear_layers()]

    def _linear_layers(self) -> list[EngineOperator]:
        """Return the operators of linear layers, for one token and for many."""
        model, device = self._engine.model, kernel_device()
        part = next((one.linear for one in model.description.attention if one.linear is not None), None)
        if part is None:
            return []
        nodes = len(model.linear_layers)
        return [
            TorchOperator(DELTA_STEP.name, nodes, partial(one_token, part), device),
            TorchOperator(DELTA_RULE.name, nodes, partial(many_tokens, part), device),
        ]

    def _stores(self) -> list[TorchOperator]:
        """Return the operators that store whole prompts in a cache format, one for each capacity."""
        parameters, device = self._engine.parameters, kernel_device()
        caches: dict[int, list[int]] = {}
        for site in self._sites:
            if not parameters.is_compressed(site.layer):
                caches.setdefault(parameters.layer_capacity(site.layer), []).append(site.cache)
        return [
            TorchOperator(
                STORE_TOKENS.name, len(own), _storing(capacity, parameters.cache_format), device, cache=own[0]
            )
            for capacity, own in caches.items()
        ]

    @property
    def _sites(self) -> tuple[CacheSite, ...]:
        """The caches; where kernels run, a layer has one, or none if it is linear."""
        return cache_sites(self._engine.model, self._engine.parameters)

    @override
    def compactions(self) -> list[Watched]:
        return [
            Watched(cache, (f"q_window.{layer}", f"keys.{layer}", f"values.{layer}"), (f"indices.{layer}",))
            for layer, cache in ((site.layer, site.cache) for site in self._sites)
            if self._engine.parameters.is_compressed(layer)
        ]

    @override
    def selections(self) -> list[Watched]:
        return [
            Watched(cache, (f"query.{layer}",), (f"attended.{layer}", f"selected.{layer}"))
            for layer, cache in ((site.layer, site.cache) for site in self._sites)
            if uses_pages(self._engine.parameters, layer)
        ]

    @override
    def draft_selections(self) -> list[list[Watched]]:
        """Return nothing: a pass could only expose the slots that its last token reads."""
        return []

    @override
    def stored_blocks(self, graph: str) -> list[list[StoredBlock]]:
        tokens = self._tokens_of(graph)
        names = ("keys", "values") if graph in ("prefill", "extend") else ("key", "value")
        return [
            [
                StoredBlock(site.cache, *(of_token(f"{name}.{site.name}", token, tokens) for name in names))
                for site in self._sites
            ]
            for token in range(tokens)
        ]

    def _tokens_of(self, graph: str) -> int:
        """Return how many keys of a row one run shows apart: each of a draft's, else one block; 0 without a format."""
        exists = getattr(self._engine, f"{graph}_graph") is not None
        if not exists or self._engine.parameters.cache_format.keys is None:
            return 0
        return 1 + (self._engine.build.draft_tokens or 0) if graph == "draft" else 1

    @override
    def describe(self) -> dict[str, str]:
        """Return PyTorch's version and device, and which kernels run."""
        device = kernel_device()
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        found = {"backend": f"torch {torch.__version__} on {where}", "kernels": "reference ops"}
        if (library := current_library()) is not None:
            digest = hashlib.sha256(library.path.read_bytes()).hexdigest()
            found["kernels"] = f"{library.path} ({library.executor}, sha256 {digest[:16]})"
        return found


def _storing(capacity: int, form: CacheFormat) -> Callable[..., tuple[Tensor, ...]]:
    return lambda k, v, prompt_lengths: store_whole(k, v, prompt_lengths, capacity, form)


def one_token(part: Linear, **given: Tensor) -> tuple[Tensor, ...]:
    """Run a linear layer's update by one token of each row, with inputs and outputs named as in KvcDeltaStep."""
    weights, inputs, state = _linear_arguments(given)
    active = torch.ones(len(state.memory), dtype=torch.bool, device=state.memory.device)
    return take_token(weights, part, inputs, state, active), *state


def many_tokens(part: Linear, lengths: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
    """Run a linear layer's update by many tokens of each row, with inputs and outputs named as in KvcDeltaRule."""
    weights, inputs, state = _linear_arguments(given)
    return take_tokens(weights, part, inputs, state, lengths), *state


def _linear_arguments(given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], LinearInputs, LinearRows]:
    weights = {CONVOLUTION: given["convolution"], DECAY: given["decay_log"], DECAY_BIAS: given["decay_bias"]}
    inputs = LinearInputs(given["mixed"], given["write"], given["decay"])
    return weights, inputs, LinearRows(given["last_inputs"], given["memory"])
