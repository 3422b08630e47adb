"""The physical floor of a decode step: bytes that must move, over the bandwidth that moves them.

    t_step >= max( (W + B * N_read * kappa) / bandwidth, 2 * P * B / FLOPS )

W: bytes of weights read per step; B: rows; N_read: pairs one row reads per KV head; kappa: bytes of one token's keys
and values over all layers; P: parameters in matrices. The floor is not a prediction: good kernels reach 75-90% of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """Published figures of one GPU."""

    name: str
    bandwidth: float
    """Memory bandwidth, bytes per second."""
    memory: float
    """Memory in bytes."""
    flops_16bit: float
    """Dense matrix throughput in fp16 or bf16, operations per second."""


H100 = Accelerator("H100", 3.35e12, 80e9, 989e12)
H200 = Accelerator("H200", 4.8e12, 141e9, 989e12)
ACCELERATORS = (H100, H200)

USABLE_MEMORY = 0.9
"""Share of the memory for weights and caches; the rest is workspace and fragmentation."""


@dataclass(frozen=True)
class StepCost:
    """The bytes that one decode step must move, and the operations that it must compute."""

    weight_bytes: float
    """Bytes of weights read once per step."""
    row_bytes: float
    """Cache bytes read per row."""
    row_flops: float = 0.0
    """Operations per row: two per parameter in a matrix."""

    def bytes(self, batch: int) -> float:
        """Return the bytes that one step of `batch` rows moves."""
        return self.weight_bytes + batch * self.row_bytes


def floor_seconds(cost: StepCost, batch: int, bandwidth: float, flops: float = math.inf) -> float:
    """Return the least time of one step in seconds: the slower of moving the bytes and computing the products."""
    return max(cost.bytes(batch) / bandwidth, batch * cost.row_flops / flops)


def ceiling_speedup(dense: StepCost, compressed: StepCost, batch: int) -> float:
    """Return the largest speed-up over an ideal dense step; it holds on every bandwidth-bound GPU."""
    return dense.bytes(batch) / compressed.bytes(batch)


def break_even_tokens(
    pairs_read: float, overhead_seconds: float, bandwidth: float, layer_token_bytes: float, batch: int
) -> float:
    """Return the context S* below which dense is faster: N_read + X * bandwidth / (B * bytes of a token in one layer).

    `overhead_seconds` is X, the cost of selection per layer beyond the dense kernel, assumed independent of the batch.
    """
    return pairs_read + overhead_seconds * bandwidth / (layer_token_bytes * batch)


def largest_batch(
    accelerator: Accelerator, resident_weights: float, row_cache_bytes: float, reserved_bytes: float = 0.0
) -> int:
    """Return the rows whose caches fit beside the weights in 90% of the memory, with `reserved_bytes` kept free."""
    free = USABLE_MEMORY * accelerator.memory - resident_weights - reserved_bytes
    return max(0, int(free // row_cache_bytes))


def fits(accelerator: Accelerator, resident_bytes: float) -> bool:
    """Return whether weights and caches fit in 90% of the memory."""
    return resident_bytes <= USABLE_MEMORY * accelerator.memory
