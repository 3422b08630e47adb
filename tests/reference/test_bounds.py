"""Page bounds: recomputed and incremental agree, and empty slots take no part."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvc_trt.reference import append, page_bounds


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_appending_equals_recomputing(data: Any) -> None:
    """Includes a page that prompt and generated tokens share, NaN keys, and fp8."""
    fp8 = data.draw(st.booleans())
    batch, slots, page_size = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 20)), data.draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, slots - 1), min_size=batch, max_size=batch)))
    keys, values = torch.randint(-20, 30, (2, batch, 2, slots, 3), generator=generator).double()
    page_min, page_max = page_bounds(keys, lengths, page_size, fp8=fp8)
    for _ in range(slots - int(lengths.max())):
        k_new, v_new = torch.randint(-30, 40, (2, batch, 2, 3), generator=generator).double()
        if data.draw(st.integers(0, 9)) == 0:
            k_new[0, 0, 0] = torch.nan
        old = keys.clone(), page_min.clone()
        state = append(keys, values, page_min, page_max, lengths, k_new, v_new, page_size=page_size, fp8=fp8)
        assert torch.equal(keys.nan_to_num(9), old[0].nan_to_num(9))
        assert torch.equal(page_min.nan_to_num(9), old[1].nan_to_num(9))
        keys, values, page_min, page_max = state
        for b, slot in enumerate(lengths.tolist()):
            assert torch.equal(keys[b, :, slot].nan_to_num(9), k_new[b].nan_to_num(9))
            assert torch.equal(values[b, :, slot], v_new[b])
        lengths = lengths + 1
        recomputed = page_bounds(keys, lengths, page_size, fp8=fp8)
        for found, expected in zip((page_min, page_max), recomputed, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_bounds_of_partial_and_empty_pages_match_hand_computed_values() -> None:
    keys = torch.arange(8.0).reshape(1, 1, 8, 1)
    page_min, page_max = page_bounds(keys, torch.tensor([4]), 3)
    assert page_min.flatten().tolist() == [0, 3, torch.inf]
    assert page_max.flatten().tolist() == [2, 3, -torch.inf]


def test_fp8_bounds_are_the_nearest_outward() -> None:
    """Every E5M2 number, each number next to one, and numbers beyond the largest."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).double()
    numbers = numbers[numbers.isfinite()].unique()
    beside = [(numbers * (1 + off)).clamp(numbers[0], numbers[-1]) for off in (-1e-15, 1e-15)]
    inside = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, *beside])
    outside = torch.tensor([60000.0, 1e300, -60000.0, -1e300], dtype=torch.float64)
    values = torch.cat([inside, outside])
    page_min, page_max = page_bounds(values.reshape(1, 1, -1, 1), torch.tensor([len(values)]), 1, fp8=True)
    place = torch.searchsorted(numbers, values).clamp(max=len(numbers) - 1)
    assert torch.equal(page_max.flatten(), numbers[place])
    mirrored = torch.searchsorted(numbers, -values).clamp(max=len(numbers) - 1)
    assert torch.equal(page_min.flatten(), -numbers[mirrored])
    assert (page_max.flatten()[: len(inside)] >= inside).all()
    assert (page_min.flatten()[: len(inside)] <= inside).all()


def test_fp8_bounds_of_nan_are_the_widest_and_empty_pages_stay_empty() -> None:
    keys = torch.tensor([torch.nan, 1.0, 3.1, 0.0]).reshape(1, 1, 4, 1)
    page_min, page_max = page_bounds(keys, torch.tensor([3]), 2, fp8=True)
    assert page_min.flatten().tolist() == [-57344, 3.0]
    assert page_max.flatten().tolist() == [57344, 3.5]
    page_min, page_max = page_bounds(keys, torch.tensor([2]), 2, fp8=True)
    assert (page_min.flatten()[1], page_max.flatten()[1]) == (torch.inf, -torch.inf)


def test_invalid_arguments_are_refused_by_name() -> None:
    keys, lengths = torch.zeros(1, 2, 8, 4), torch.tensor([8])
    page_min, page_max = page_bounds(keys, lengths, 3)
    new = torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match=r"lengths has shape \[1\] with values \[8\]; expected each in 0..7"):
        append(keys, keys, page_min, page_max, lengths, new, new, page_size=3)
    with pytest.raises(ValueError, match=r"page_max has shape \[1, 2, 2, 4\]; expected \[1, 2, 3, 4\]"):
        append(keys, keys, page_min, page_max[:, :, :2], lengths - 1, new, new, page_size=3)
    with pytest.raises(ValueError, match="page_size is 0; expected at least 1"):
        page_bounds(keys, lengths, 0)
    with pytest.raises(ValueError, match=r"keys .* is torch.int64; expected torch.float32 or torch.float64"):
        page_bounds(keys.long(), lengths, 3)
