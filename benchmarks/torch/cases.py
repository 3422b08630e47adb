"""The cells of the torch backend's benchmark, and their expected cost: nothing here needs a GPU.

A cell is one model under one policy, one batch, one context; every row is half-way through its answer to a prompt that
fills the context.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from benchmarks.kernels.cases import ITEM_BYTES, MODEL, NEW_TOKENS, resolved
from benchmarks.kernels.sweep import SweepPoint
from kvc_trt.backends.torch import memory
from kvc_trt.engine.program import NO_FILE, Program
from kvc_trt.graph.state import state_tensors
from kvc_trt.methods.base.parameters import BASELINE, DEFAULT, PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile.accelerators import H200
from kvc_trt.profile.floor import StepCost, ceiling_speedup, floor_seconds
from kvc_trt.profile.model_size import count_parameters, weight_bytes
from kvc_trt.profile.traffic import entries_cached, row_traffic

DENSE = ("dense", "sdpa_flash", "flashinfer")
"""The whole cache, through our kernel or another's."""
FORMATS = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Cell:
    """One throughput to measure."""

    name: str
    """A policy, or one of DENSE: our kernel or another's over the whole cache."""
    batch: int
    context: int
    budget: int | None
    """Token budget; None for the dense ones."""
    dtype: str = "bfloat16"
    model: ModelConfig = MODEL

    @property
    def identity(self) -> dict[str, Any]:
        """Return the fields that distinguish the cell's entry from others."""
        return {"name": self.name, "batch": self.batch, "context": self.context, "budget": self.budget}

    @property
    def prompt(self) -> int:
        return self.context - NEW_TOKENS

    @cached_property
    def parameters(self) -> PolicyParameters:
        policy = BASELINE if self.budget is None else self.name
        return resolved(policy, self.model, self.budget or 512, self.prompt)

    @property
    def program(self) -> Program:
        """State and constants. It has no graphs and no weight file: an executor that is given weights reads none."""
        state = state_tensors(self.model, self.parameters, self.dtype)
        return Program(self.model, self.parameters, state, NO_FILE, NO_FILE, NO_FILE)

    @property
    def entries(self) -> list[int]:
        """Tokens in each layer's cache before the step."""
        layers = range(self.model.num_hidden_layers)
        return [entries_cached(self.parameters, layer, self.prompt, NEW_TOKENS // 2) for layer in layers]

    @property
    def position(self) -> int:
        return self.prompt + NEW_TOKENS // 2

    @property
    def cost(self) -> StepCost:
        """Bytes and operations that a step cannot do without."""
        parameters = count_parameters(self.model)
        traffic = row_traffic(self.model, self.parameters, ITEM_BYTES[self.dtype], self.prompt, NEW_TOKENS // 2)
        matrices = parameters.linear + parameters.lm_head
        return StepCost(weight_bytes(self.model, FORMATS[self.dtype]).per_step, traffic.bytes, 2.0 * matrices)

    def floor_seconds(self, bandwidth: float) -> float:
        """Least time of a step at that bandwidth."""
        return floor_seconds(self.cost, self.batch, bandwidth, H200.flops_16bit)

    @property
    def ceiling(self) -> float:
        """Largest speed-up over dense that reading less allows."""
        return ceiling_speedup(replace(self, name="dense", budget=None).cost, self.cost, self.batch)

    @property
    def needed_bytes(self) -> int:
        """Caches, the random numbers they are filled with, and the step, beside the weights."""
        caches = memory.cache_bytes(self.program.state, self.batch)
        largest = max(tensor.bytes_per_row() for tensor in self.program.state)
        return caches + 4 * largest + memory.step_bytes(self.model, self.batch, ITEM_BYTES[self.dtype])


def cells(
    batches: Sequence[int], contexts: Sequence[int], budgets: Sequence[int], points: Sequence[SweepPoint],
    baselines: Sequence[str], dtype: str, model: ModelConfig = MODEL,
) -> Iterator[Cell]:  # fmt: skip
    """Yield the cells; the dense ones of a batch and context come first, the others are compared with the fastest."""
    product = itertools.product(batches, contexts, budgets)
    wanted = [*(SweepPoint(DEFAULT, *numbers) for numbers in product), *points]
    for batch, context in dict.fromkeys((point.batch, point.context) for point in wanted):
        for name in ("dense", *baselines):
            yield Cell(name, batch, context, None, dtype, model)
        for point in dict.fromkeys(wanted):
            if (point.batch, point.context) == (batch, context):
                yield Cell(point.policy, batch, context, point.budget, dtype, model)


def figures(cell: Cell, seconds: float, bandwidth: float) -> dict[str, float]:
    """Return a step's time as throughput, beside the floor at the bandwidth of this GPU's own reading."""
    floor = cell.floor_seconds(bandwidth)
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": cell.batch / seconds,
        "floor_ms": 1e3 * floor,
        "share_of_floor": floor / seconds,
    }


def against_dense(cell: Cell, seconds: float, dense_seconds: float | None) -> dict[str, float]:
    """Return the ceiling of the speed-up, and the speed-up over the fastest dense step measured on this GPU."""
    found = {"ceiling": cell.ceiling}
    if dense_seconds is not None:
        speedup = dense_seconds / seconds
        found |= {"speedup": speedup, "share_of_ceiling": speedup / cell.ceiling}
    return found
