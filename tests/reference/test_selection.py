"""The tie rule: larger first, among equals the lower index, NaN last."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kvc_trt.reference import compaction, page_bounds
from kvc_trt.reference.methods import hybrid
from kvc_trt.reference.selection import best, best_ascending, dot_products, sum_in_order


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("inf")]), min_size=1, max_size=40), st.data())
def test_best_takes_the_lowest_index_among_equals(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(scores)))
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    assert best(torch.tensor(scores), k).tolist() == expected
    assert best_ascending(torch.tensor(scores), k).tolist() == sorted(expected)


def test_nan_is_below_every_finite_value() -> None:
    scores = torch.tensor([torch.nan, -3e38, torch.nan, 1.0, -1e30])
    assert best(scores, 5).tolist() == [3, 4, 1, 0, 2]


def test_more_than_all_scores_cannot_be_taken() -> None:
    with pytest.raises(ValueError, match=r"scores has shape \[3\]; cannot take k=4"):
        best(torch.zeros(3), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [5, 17, 33, 64, 71])
def test_equal_columns_have_equal_sums(columns: int, dtype: torch.dtype) -> None:
    """torch.sum does not promise this: the end of a vectorised row is added in another order."""
    values = torch.randn(32, 1, dtype=dtype, generator=torch.Generator().manual_seed(columns)).expand(-1, columns)
    assert len(sum_in_order(values.contiguous(), 0).unique()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 5, 17, 33, 70, 257])
@pytest.mark.parametrize("queries", [1, 4, 33])
@pytest.mark.parametrize("size", [16, 67, 128])
def test_equal_keys_have_equal_products(size: int, queries: int, count: int, dtype: torch.dtype) -> None:
    """A plain matrix product does not promise this: float64 on an AMD EPYC breaks it in nine shapes of ten."""
    generator = torch.Generator().manual_seed(count)
    query = torch.randn(queries, size, dtype=dtype, generator=generator)
    keys = torch.randn(1, size, dtype=dtype, generator=generator).expand(count, -1)
    products = dot_products(query, keys)
    assert torch.equal(products, products[:, :1].expand(-1, count))
    torch.testing.assert_close(products, query @ keys.T, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [17, 41, 70])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_equal_keys_have_equal_scores_in_both_stages(count: int, group: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    keys = torch.randn(1, 1, 1, 67, dtype=dtype, generator=generator).expand(1, 1, count + 4, 67).contiguous()
    q_window = torch.randn(1, group, 32, 67, dtype=dtype, generator=generator)
    keys[..., count:, :] = 0  # no query of the window sees another number of equal keys
    lengths = torch.tensor([count + 4])
    found = compaction.scores(q_window[:, :, -4:], keys, lengths, pool_kernel=1).values[0, 0, :count]
    assert len(found.unique()) == 1
    for page_size in (1, 3):
        page_min, page_max = page_bounds(keys[:, :, :count], torch.tensor([count]), page_size)
        step = hybrid.row_scores(q_window[0, :, 0], count, page_min[0], page_max[0], page_size=page_size, top_r=65)
        assert len(step.tokens.unique()) == 1
