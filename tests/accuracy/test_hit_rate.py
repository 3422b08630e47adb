"""SnapKV's hit rate: small cases worked out by hand."""

from __future__ import annotations

import pytest
import torch

from kvc_trt.accuracy.hit_rate import (
    HitRate,
    attention_kept,
    hit_rate,
    kept_tokens,
    mean_hit_rate,
    overlap_with_exact,
    select_prefix,
)

ATTENTION = torch.tensor([[0.40, 0.10, 0.04, 0.30, 0.06], [0.02, 0.50, 0.05, 0.01, 0.02]])
"""Two heads over a prefix of five; what is left of 1 lies on the window and the answer."""


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def test_votes_are_summed_over_the_window_and_ties_go_to_the_lowest_index():
    window = torch.tensor([[[0.5, 0.25, 0.0, 0.25], [0.0, 0.25, 0.5, 0.25]]])  # sums 0.5, 0.5, 0.5, 0.5
    assert select_prefix(window, 2).equal(mask("xx.."))
    window[0, 0, 3] += 0.125
    assert select_prefix(window, 2).equal(mask("x..x"))


def test_hits_are_the_looked_for_tokens_that_were_selected():
    # Above 0.05: 0, 1, 3 and 4 of the first head, 1 of the second (0.05 itself is not above).
    assert hit_rate(mask("x..x.", "x...."), ATTENTION) == HitRate(2 / 5, 5, 2)
    assert hit_rate(mask("xxxxx", "xxxxx"), ATTENTION).rate == 1.0


def test_a_query_that_looks_for_nothing_is_skipped_and_counted():
    nothing = hit_rate(mask("x....", "x...."), ATTENTION, threshold=0.6)
    assert nothing == HitRate(None, 0, 0)
    assert mean_hit_rate([HitRate(0.5, 2, 1), nothing, HitRate(1.0, 1, 1)]) == (0.75, 1)
    assert mean_hit_rate([nothing]) == (None, 1)


def test_attention_kept_is_a_share_of_what_lies_on_the_prefix():
    expected = ((0.40 + 0.30) / 0.90 + 0.02 / 0.60) / 2
    assert attention_kept(mask("x..x.", "x...."), ATTENTION) == pytest.approx(expected)
    assert attention_kept(mask("....."), torch.zeros(1, 5)) == 1.0


def test_overlap_with_the_exact_choice_of_the_same_size():
    assert overlap_with_exact(mask("xx...", "xx..."), ATTENTION) == pytest.approx((0.5 + 0.5) / 2)
    assert overlap_with_exact(mask("x..x.", ".x..."), ATTENTION) == 1.0
    assert overlap_with_exact(mask("....."), ATTENTION[:1]) == 1.0


def test_a_keep_rate_is_not_lost_to_rounding():
    assert kept_tokens(0.29, 100) == 29
    assert kept_tokens(0.05, 2999) == 149


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"expected \[H,P\] twice"):
        hit_rate(mask("xx"), ATTENTION)
    with pytest.raises(ValueError, match="expected 0 to 5"):
        select_prefix(torch.zeros(1, 2, 5), 6)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        kept_tokens(5, 100)
