"""The floor model reproduces its published tables for Llama-3.1-8B (computed independently of this code)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.profile.accelerators import H100, H200
from kvc_trt.profile.floor import (
    MOST_ROWS,
    StepCost,
    break_even_tokens,
    ceiling_speedup,
    floor_seconds,
    largest_batch,
)

KILO = 1024
TOKEN_BYTES = {"bf16": 131072, "fp8": 65536}
LINEAR, LM_HEAD = 6_979_321_856, 525_336_576  # the embedding table has the size of the output matrix
WEIGHT_BYTES = {"bf16": 2 * (LINEAR + LM_HEAD), "fp8": LINEAR + 2 * LM_HEAD}
RESIDENT_BYTES = {kind: read + 2 * LM_HEAD for kind, read in WEIGHT_BYTES.items()}

# Pairs read per step at t = 2048, 1024, 512, 256, by context in K: the table's own resolution of the budgets.
PAIRS_READ = {
    16: (2055, 1022, 513, 257),
    32: (2044, 1025, 514, 257),
    64: (2050, 1027, 513, 256),
    128: (2055, 1026, 512, 256),
}

# kind, batch, context in K, floor ms H100 / H200, does not fit H100 / H200, ceilings at t = 2048, 1024, 512, 256
FULL_CACHE = [
    ("bf16", 1, 16, 5.12, 3.57, False, False, (1.12, 1.13, 1.14, 1.14)),
    ("bf16", 1, 32, 5.76, 4.02, False, False, (1.26, 1.27, 1.28, 1.28)),
    ("bf16", 1, 64, 7.04, 4.92, False, False, (1.54, 1.56, 1.57, 1.57)),
    ("bf16", 1, 128, 9.61, 6.71, False, False, (2.11, 2.13, 2.14, 2.14)),
    ("bf16", 8, 16, 9.61, 6.71, False, False, (1.88, 2.00, 2.07, 2.11)),
    ("bf16", 8, 32, 14.74, 10.29, False, False, (2.88, 3.07, 3.18, 3.23)),
    ("bf16", 8, 64, 24.99, 17.44, True, False, (4.88, 5.20, 5.39, 5.48)),
    ("bf16", 8, 128, 45.51, 31.76, True, True, (8.88, 9.48, 9.81, 9.98)),
    ("bf16", 32, 16, 24.99, 17.44, True, False, (3.54, 4.34, 4.88, 5.20)),
    ("bf16", 32, 32, 45.51, 31.76, True, True, (6.46, 7.90, 8.88, 9.48)),
    ("bf16", 32, 64, 86.53, 60.39, True, True, (12.28, 15.01, 16.89, 18.03)),
    ("bf16", 32, 128, 168.59, 117.66, True, True, (23.90, 29.24, 32.92, 35.11)),
    ("fp8", 1, 128, 4.96, 3.46, False, False, (2.04, 2.05, 2.06, 2.07)),
    ("fp8", 8, 64, 12.65, 8.83, False, False, (4.66, 4.95, 5.11, 5.19)),
    ("fp8", 8, 128, 22.91, 15.99, True, False, (8.43, 8.96, 9.25, 9.40)),
    ("fp8", 32, 32, 22.91, 15.99, True, False, (6.23, 7.54, 8.43, 8.96)),
    ("fp8", 32, 128, 84.45, 58.94, True, True, (22.93, 27.78, 31.08, 33.02)),
]


def cost(kind: str, tokens: float) -> StepCost:
    return StepCost(WEIGHT_BYTES[kind], tokens * TOKEN_BYTES[kind], 2 * (LINEAR + LM_HEAD))


@pytest.mark.parametrize(("kind", "batch", "context", "h100", "h200", "over_h100", "over_h200", "ceilings"), FULL_CACHE)
def test_floors_of_the_full_cache_match_the_golden_table(
    kind, batch, context, h100, h200, over_h100, over_h200, ceilings
):
    tokens = context * KILO
    dense = cost(kind, tokens)
    assert 1e3 * floor_seconds(dense, batch, H100.bandwidth, H100.flops_16bit) == pytest.approx(h100, abs=0.0051)
    assert 1e3 * floor_seconds(dense, batch, H200.bandwidth, H200.flops_16bit) == pytest.approx(h200, abs=0.0051)
    resident = RESIDENT_BYTES[kind] + batch * tokens * TOKEN_BYTES[kind]
    assert (resident > H100.usable, resident > H200.usable) == (over_h100, over_h200)
    found = [ceiling_speedup(dense, cost(kind, pairs), batch) for pairs in PAIRS_READ[context]]
    assert found == pytest.approx(ceilings, rel=1e-3, abs=0.0051)


@pytest.mark.parametrize(
    ("batch", "budget", "h100", "h200"),
    [
        (1, 2048, 219, 314),
        (1, 256, 223, 319),
        (8, 1024, 1666, 2387),
        (8, 512, 1724, 2470),
        (32, 2048, 4545, 6513),
        (32, 512, 6245, 8949),
        (32, 0, 7142, 10233),
    ],
)
def test_tokens_per_second_of_a_budget_match_the_golden_table(batch, budget, h100, h200):
    for accelerator, expected in ((H100, h100), (H200, h200)):
        found = batch / floor_seconds(cost("bf16", budget), batch, accelerator.bandwidth, accelerator.flops_16bit)
        assert found == pytest.approx(expected, rel=1.5e-3, abs=0.51)


@pytest.mark.parametrize(
    ("accelerator", "context", "stored", "batch"),
    [
        (H100, 32, None, 13),
        (H100, 128, None, 3),
        (H200, 64, None, 12),
        (H100, 32, 12899, 30),
        (H100, 128, 8630, 34),
        (H200, 128, 17020, 41),
        (H200, 32, 4255, 191),
    ],
)
def test_the_largest_batch_matches_the_golden_table(accelerator, context, stored, batch):
    """A compressed row is stored beside one full prefill cache; a full row is its own prefill."""
    full = context * KILO * TOKEN_BYTES["bf16"]
    row, reserved = (full, 0) if stored is None else (stored * TOKEN_BYTES["bf16"], full)
    assert largest_batch(accelerator.usable, lambda rows: RESIDENT_BYTES["bf16"] + reserved + rows * row) == batch


@given(fixed=st.integers(0, 1 << 40), row=st.integers(1, 1 << 34), usable=st.integers(0, 1 << 41))
def test_the_largest_batch_fits_and_one_row_more_does_not(fixed, row, usable):
    rows = largest_batch(usable, lambda count: fixed + count * row)
    assert rows == min(MOST_ROWS, max(0, (usable - fixed) // row))


@pytest.mark.parametrize(
    ("microseconds", "h100", "h200"), [(2, 1.6, 2.3), (5, 4.1, 5.9), (10, 8.2, 11.7), (20, 16.4, 23.4)]
)
def test_break_even_lengths_match_the_golden_table(microseconds, h100, h200):
    per_layer = TOKEN_BYTES["bf16"] / 32
    for accelerator, kilotokens in ((H100, h100), (H200, h200)):
        found = break_even_tokens(0, microseconds * 1e-6, accelerator.bandwidth, per_layer, 1)
        assert found / 1000 == pytest.approx(kilotokens, abs=0.051)
    assert break_even_tokens(512, 1e-5, H100.bandwidth, per_layer, 8) == pytest.approx(512 + 8178.7 / 8, abs=0.1)


def test_a_large_batch_is_bound_by_arithmetic():
    """Matrix products pass the weight reads near batch FLOPS / bandwidth = 295 on H100, 206 on H200."""
    weights_only = StepCost(2 * (LINEAR + LM_HEAD), 0.0, 2 * (LINEAR + LM_HEAD))
    for accelerator, turning_point in ((H100, 295), (H200, 206)):
        below, above = turning_point - 2, turning_point + 2
        moved = weights_only.bytes(below) / accelerator.bandwidth
        assert floor_seconds(weights_only, below, accelerator.bandwidth, accelerator.flops_16bit) == moved
        assert floor_seconds(weights_only, above, accelerator.bandwidth, accelerator.flops_16bit) > moved
    assert floor_seconds(weights_only, 4096, H100.bandwidth, math.inf) == weights_only.weight_bytes / H100.bandwidth
