"""The golden values of the two stages, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvc_trt.reference import compact, compaction, dense_attention, hybrid_attention, page_bounds
from kvc_trt.reference.methods import hybrid


def stage_one() -> tuple[Tensor, Tensor, Tensor]:
    """One KV head, two query heads that look at different channels; float64, because two of the pooled maxima are equal
    in exact arithmetic and float32 may order them either way."""
    keys = torch.zeros(1, 1, 12, 2, dtype=torch.float64)
    for position, row in {1: (3, 0), 4: (0, 3), 7: (2, 0), 8: (0, 2)}.items():
        keys[0, 0, position] = torch.tensor(row)
    q_window = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
    q_window[0, 0, :, 0] = 2
    q_window[0, 1, :, 1] = 2
    return q_window, keys, torch.tensor([12])


def test_stage_one_sums_before_it_pools() -> None:
    q_window, keys, lengths = stage_one()
    kept = compact(q_window, keys, 2 * keys, lengths, prompt_budget=10, pool_kernel=3)
    assert kept.indices.tolist() == [[[0, 1, 2, 3, 4, 5, 6, 7, 10, 11]]]
    assert kept.indices.dtype == torch.int32
    assert kept.lengths.tolist() == [10]
    assert torch.equal(kept.keys[0, 0], keys[0, 0, kept.indices[0, 0].long()])
    assert torch.equal(kept.values, 2 * kept.keys)


def test_stage_one_scores_match_the_golden_case() -> None:
    q_window, keys, lengths = stage_one()
    found = compaction.scores(q_window, keys, lengths, pool_kernel=3)
    expected = torch.tensor([1.470537] * 6 + [0.373279] * 4, dtype=torch.float64)
    torch.testing.assert_close(found.values[0, 0, :10], expected, rtol=0, atol=5e-7)
    assert torch.isneginf(found.values[0, 0, 10:]).all()
    torch.testing.assert_close(found.magnitude, torch.tensor([[6 / 2**0.5]], dtype=torch.float64))


def test_averages_count_zeros_beyond_the_prompt() -> None:
    """By hand: votes s1 = s4 = 1.470537, s7 = s8 = 0.373279, others 0.041664; three of them added, 0 beyond the ends.

    Maxima of the same votes keep 6 and drop 8 (`test_stage_one_sums_before_it_pools`)."""
    q_window, keys, lengths = stage_one()
    found = compaction.scores(q_window, keys, lengths, pool_kernel=3, pool_kind="avg").values[0, 0, :10]
    first, last = 1.470537 + 0.041664, 0.373279 + 0.041664
    sums = [first, *[first + 0.041664] * 5, last + 0.041664, *[2 * 0.373279 + 0.041664] * 2, last]
    torch.testing.assert_close(found, torch.tensor(sums, dtype=torch.float64), rtol=0, atol=2e-6)
    for budget, expected in (
        (10, [0, 1, 2, 3, 4, 5, 7, 8, 10, 11]),
        (11, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11]),  # an average over the two tokens that exist would keep 9, not 6
    ):
        kept = compact(q_window, keys, keys, lengths, prompt_budget=budget, pool_kernel=3, pool_kind="avg")
        assert kept.indices.tolist() == [[expected]]


@pytest.mark.parametrize("kernel", [1, 3, 7, 31])
def test_averages_are_those_of_the_released_code(kernel: int) -> None:
    """SnapKV's code: torch's avg_pool1d with padding kernel // 2, whose zeros count (its default)."""
    generator = torch.Generator().manual_seed(3)
    q_window, keys = (torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64) for n in (4, 40))
    votes = compaction.scores(q_window, keys, torch.tensor([40]), pool_kernel=1).values[0, :, :36]
    averages = torch.nn.functional.avg_pool1d(votes[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]
    found = compaction.scores(q_window, keys, torch.tensor([40]), pool_kernel=kernel, pool_kind="avg").values[0, :, :36]
    torch.testing.assert_close(found / kernel, averages)


def stage_two(dtype: torch.dtype) -> dict[str, Tensor]:
    keys = [[1, 0, 0, 0], [0, 1, 0, 0], [2, 0, 1, 1], [3, 0, 0, -1], [0, 0, 2, 0], [1, 1, 0, 2], [2, -1, 0, 0]]
    cache = torch.tensor(keys, dtype=dtype)[None, None]
    lengths = torch.tensor([7])
    page_min, page_max = page_bounds(cache, lengths, 3)
    return {
        "query": torch.tensor([[[4, -1, 0, 2], [2, -1, 0, -4]]], dtype=dtype),
        "keys": cache,
        "values": torch.arange(1, 8, dtype=dtype)[None, None, :, None].expand(1, 1, 7, 4),
        "lengths": lengths,
        "page_min": page_min,
        "page_max": page_max,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stage_two_tokens_match_the_golden_case(dtype: torch.dtype) -> None:
    state = stage_two(dtype)
    output, selected = hybrid_attention(**state, page_size=3, top_r=2, top_k=4)
    assert selected.tolist() == [[[0, 3, 4, 5]]]
    assert selected.dtype == torch.int32
    bar = 1e-6 + 10 * 4.4 * torch.finfo(dtype).eps / 2  # of the decimals, and of ten roundings from score to output
    torch.testing.assert_close(output[0, :, 0], torch.tensor([4.237280, 3.953375], dtype=dtype), rtol=0, atol=bar)
    dense = dense_attention(state["query"], state["keys"], state["values"], state["lengths"])
    torch.testing.assert_close(dense[0, :, 0], torch.tensor([4.385796, 4.164145], dtype=dtype), rtol=0, atol=bar)


def test_stage_two_pages_match_the_golden_case() -> None:
    _, selected = hybrid_attention(**stage_two(torch.float32), page_size=3, top_r=2, top_k=4, select="pages")
    assert selected.tolist() == [[[3, 4, 5, -1]]]


def test_stage_two_scores_match_the_golden_case() -> None:
    state = stage_two(torch.float64)
    bounds = state["page_min"][0], state["page_max"][0]
    found = hybrid.row_scores(state["query"][0], 7, *bounds, page_size=3, top_r=2)
    assert found.channel_values.tolist() == [[6, 2, 0, 6]]
    assert found.channels.tolist() == [[0, 3]]
    low, high = 0.045157, 0.273124
    expected = torch.tensor([[low, low, low, high, high, high, low]], dtype=torch.float64)
    torch.testing.assert_close(found.tokens, expected, rtol=0, atol=5e-7)
    torch.testing.assert_close(found.magnitude, torch.tensor([14 / 1.851640], dtype=torch.float64), rtol=1e-6, atol=0)


def test_the_last_tokens_can_be_forced() -> None:
    _, selected = hybrid_attention(**stage_two(torch.float32), page_size=3, top_r=2, top_k=4, force_recent=2)
    assert selected.tolist() == [[[3, 4, 5, 6]]]
    _, selected = hybrid_attention(**stage_two(torch.float32), page_size=3, top_r=2, top_k=4, force_recent=4)
    assert selected.tolist() == [[[3, 4, 5, 6]]]
    _, selected = hybrid_attention(**stage_two(torch.float32), page_size=3, top_r=2, top_k=3, force_recent=3)
    assert selected.tolist() == [[[4, 5, 6]]]
