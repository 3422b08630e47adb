"""The physical floor of a decode step: bytes that must move, over the bandwidth that moves them.

    t_step >= max( (W + B * N_read * kappa) / bandwidth, 2 * P * B / FLOPS )

W: bytes of weights read per step; B: rows; N_read: pairs one row reads per KV head; kappa: bytes of one token's keys
and values over all layers; P: parameters in matrices. The floor is not a prediction: good kernels reach 75-90% of it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

MOST_ROWS = 1 << 16
"""More rows than any batch has."""


@dataclass(frozen=True)
class StepCost:
    """The bytes that one decode step must move, and the operations that it must compute."""

    weight_bytes: float
    """Bytes of weights that a step of one row reads."""
    row_bytes: float
    """Bytes of cache and state moved per row (`RowTraffic.bytes`)."""
    row_flops: float = 0.0
    """Operations per row: two per parameter in a matrix."""
    expert_bytes: float = 0.0
    """Bytes of the matrices of all experts."""
    expert_share: float = 0.0
    """The share of the experts that a row reads."""

    def weights_read(self, tokens: int) -> float:
        """Return the bytes of weights that a pass over `tokens` tokens reads.

        Tokens that each choose k of E experts at random are expected to choose E (1 - (1 - k/E)^tokens) distinct ones.
        """
        more_experts = 1.0 - (1.0 - self.expert_share) ** tokens - self.expert_share
        return self.weight_bytes + self.expert_bytes * more_experts

    def bytes(self, batch: int) -> float:
        """Return the bytes that one step of `batch` rows moves."""
        return self.weights_read(batch) + batch * self.row_bytes


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


def largest_batch(usable: float, total_bytes: Callable[[int], float]) -> int:
    """Return the most rows whose memory fits in `usable` bytes; `total_bytes` must not fall as rows are added."""
    rows = 1
    while total_bytes(rows) <= usable:
        rows *= 2
        if rows > MOST_ROWS:
            return MOST_ROWS
    # rows // 2 fit (none, if rows is 1), and rows do not.
    return bisect_right(range(rows // 2 + 1, rows), usable, key=total_bytes) + rows // 2
