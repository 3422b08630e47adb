"""An engine on one GPU, or divided among several: the bytes that each GPU holds and reads, and its operations.

All tables of a plan take their figures of GPUs from here, so they cannot disagree. The number of rows that fit follows
from the backend's own model of its memory if it has one, otherwise from weights and caches. Times are floors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile.accelerators import Accelerator
from kvc_trt.profile.floor import StepCost, floor_seconds, largest_batch
from kvc_trt.profile.model_size import (
    WeightBytes,
    cache_itemsize,
    count_parameters,
    prefill_operations,
    token_cache_bytes,
    weight_bytes,
)
from kvc_trt.profile.traffic import cache_bytes, full_state_bytes, full_step_bytes, row_traffic

SIDES = ("full", "compressed")
"""`full` is the engine that keeps and reads every token, `compressed` that of the policy."""
MemoryOf = Callable[[PolicyParameters, int], float]
"""Return the bytes of one GPU while an engine of these parameters decodes the given number of rows."""


@dataclass(frozen=True)
class PlacedSide:
    """The memory and the step cost of one of `SIDES` on each GPU."""

    row_bytes: int
    """Bytes of one row's cache."""
    step: StepCost
    memory: Callable[[int], float]
    """Return the bytes of everything on a GPU for a number of rows; more rows never take fewer bytes."""


@dataclass(frozen=True)
class Placement:
    """An engine, and the part of it on each GPU."""

    model: ModelConfig
    local: ModelConfig
    """The part of the model that one GPU computes; with one GPU, `model` itself."""
    parameters: PolicyParameters
    weights: str
    """The format of the weights."""
    turns: bool
    """True if the engine takes turns; each cache slot then stores its position."""
    ranks: int
    """The number of GPUs that share the engine."""
    size: WeightBytes
    """Bytes of the weights on each GPU."""
    sides: Mapping[str, PlacedSide]

    @property
    def itemsize(self) -> int:
        """Bytes of one cache element in the type of the activations."""
        return cache_itemsize(self.weights)

    @property
    def compresses(self) -> bool:
        """True if a step of the longest row reads less than the whole cache."""
        full, compressed = (self.sides[name].step.row_bytes for name in SIDES)
        return self.parameters.compresses and round(compressed) < round(full)

    def rows_that_fit(self, side: str, gpu: Accelerator) -> int:
        """Return the largest number of rows whose memory fits the GPU."""
        return largest_batch(gpu.usable, self.sides[side].memory)

    def fits(self, side: str, gpu: Accelerator, rows: int) -> bool:
        """Return whether `rows` rows fit the GPU."""
        return self.sides[side].memory(rows) <= gpu.usable

    def holds(self, gpu: Accelerator) -> bool:
        """Return whether at least one row of the compressed engine fits the GPU."""
        return self.fits("compressed", gpu, 1)

    def step_seconds(self, side: str, gpu: Accelerator, rows: int, row_bytes: float | None = None) -> float:
        """Return the floor of one decode step in seconds; each row moves `row_bytes`, by default as the longest row.

        Sums between several GPUs are left out.
        """
        cost = self.sides[side].step
        if row_bytes is not None:
            cost = replace(cost, row_bytes=row_bytes)
        return floor_seconds(cost, rows, gpu.bandwidth, gpu.flops_16bit)

    def prefill_seconds(self, gpu: Accelerator, tokens: int) -> float:
        """Return the floor in seconds of one prompt's prefill: its operations, or reading the weights if longer."""
        return max(
            prefill_operations(self.local, tokens) / gpu.flops_16bit,
            self.sides["full"].step.weights_read(tokens) / gpu.bandwidth,
        )

    def bytes_read(self, side: str, tokens: int, generated: int) -> float:
        """Return the bytes of cache and state that a step of one row moves on each GPU (`RowTraffic.bytes`).

        The row has a prompt of `tokens` tokens and has generated `generated`.
        """
        rule = self.parameters if side == "compressed" else self.parameters.keeping_everything()
        return row_traffic(self.local, rule.in_the_mean, self.itemsize, tokens, generated).bytes


def on_one_gpu(
    model: ModelConfig, parameters: PolicyParameters, weights: str, *, turns: bool, memory: MemoryOf | None = None
) -> Placement:
    """Return the placement on one GPU; `memory` is the backend's own model of its memory, if it has one.

    Without `memory`, a GPU holds the weights, the caches, and for prefill one layer's keys and values of one prompt.
    `turns` says whether the backend takes turns; the engine does if its policy does too.
    """
    turns = turns and parameters.no_turn is None
    itemsize, size = cache_itemsize(weights), weight_bytes(model, weights)
    prompt = parameters.max_input_len * token_cache_bytes(model, itemsize)
    rows = {
        "full": full_state_bytes(model, parameters.max_sequence_len, itemsize, parameters.kv_cache),
        "compressed": cache_bytes(model, parameters, itemsize, turns=turns).total,
    }
    counts = count_parameters(model)
    flops = 2.0 * (counts.multiplied + counts.lm_head)
    read = {
        "full": float(full_step_bytes(model, parameters.max_sequence_len, itemsize, parameters.kv_cache)),
        "compressed": row_traffic(
            model, parameters.in_the_mean, itemsize, parameters.max_input_len, parameters.max_output_len
        ).bytes,
    }
    rules = {"full": parameters.keeping_everything(), "compressed": parameters}

    def side(name: str) -> PlacedSide:
        def simple(count: int) -> float:
            return size.resident + prompt + count * rows[name]

        def own(count: int) -> float:
            assert memory is not None
            return memory(rules[name], count)

        return PlacedSide(rows[name], size.step(read[name], flops), simple if memory is None else lru_cache(own))

    return Placement(model, model, parameters, weights, turns, 1, size, {name: side(name) for name in SIDES})
