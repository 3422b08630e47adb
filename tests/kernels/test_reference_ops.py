"""The reference in the C ABI's shapes: the numbers of `kvc_trt.reference`, and the ABI's own additions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.kernels import reference_ops
from tests.plugins_cuda.cases import compact_case, step_case
from tests.plugins_cuda.checks import assert_same_bits

LOWEST = torch.finfo(torch.float32).min


def test_a_compaction_is_the_references_with_room_behind_it():
    case = compact_case(lengths=[60, 24, 3], budget=24, capacity=31, page=4)
    found = reference_ops.compute("compact", case.arguments())
    expected = reference.compact(
        case.q_window, case.k, case.v, case.prompt_lengths, prompt_budget=24, pool_kernel=case.pool_kernel
    )
    for name in ("keys", "values", "indices"):
        field = {"keys": "k_cache", "values": "v_cache"}.get(name, name)
        assert torch.equal(getattr(found, field)[:, :, :24], getattr(expected, name))
    assert not found.k_cache[:, :, 24:].any()
    assert bool((found.indices[:, :, 24:] == -1).all())
    assert found.cache_lengths.tolist() == [24, 24, 3]
    low, high = reference.page_bounds(found.k_cache, found.cache_lengths, 4)
    assert torch.equal(found.bounds[0, 1, :32, 5], high[0, 1, 5])
    assert torch.equal(found.bounds[0, 1, 32:, 5], -low[0, 1, 5])
    assert bool((found.bounds[2, :, :, 1:] == LOWEST).all())


def test_lengths_are_clamped_and_an_empty_prompt_keeps_nothing():
    case = compact_case(lengths=[40, 40, 40])
    case.prompt_lengths[:] = torch.tensor([-3, 99, 40])
    found = reference_ops.compute("compact", case.arguments())
    assert found.cache_lengths.tolist() == [0, 24, 24]
    assert torch.equal(found.indices[1], found.indices[1].sort().values) or bool((found.indices[1] == -1).any())
    assert bool((found.indices[0] == -1).all())
    assert not found.k_cache[0].any()


def test_too_little_room_is_refused():
    case = compact_case(lengths=[40])
    with pytest.raises(ValueError, match="capacity is 23; expected at least 24"):
        reference_ops.compute("compact", {**case.arguments(), "capacity": 23})


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(1, 24),
    st.integers(0, 12),
    st.integers(0, 24),
)
def test_a_step_is_the_references_on_the_appended_cache(lengths, page, top_k, budget, recent):
    case = step_case(lengths=lengths, page=page, top_k=top_k, token_budget=budget, recent=recent)
    before = {name: getattr(case, name).clone() for name in ("k_cache", "v_cache", "bounds")}
    output, selected = reference_ops.compute("hybrid_attention", case.arguments())
    pages = -(-case.k_cache.shape[2] // page)
    keys, values, low, high = reference.append(
        before["k_cache"], before["v_cache"], *reference_ops.page_major(before["bounds"], pages), case.cache_lengths,
        case.k_new, case.v_new, page_size=page,
    )  # fmt: skip
    expected, chosen = reference.hybrid_attention(
        case.query, keys, values, case.cache_lengths + 1, low, high, page_size=page, top_r=case.top_r,
        top_k=case.top_k, token_budget=budget, dense_until=case.dense_until, force_recent=case.recent,
    )  # fmt: skip
    assert torch.equal(output, expected)
    assert torch.equal(selected, chosen)
    assert_same_bits(case.k_cache, keys, "k_cache")
    assert_same_bits(case.v_cache, values, "v_cache")
    fresh = reference_ops.channel_major(*reference.page_bounds(keys, case.cache_lengths + 1, page), torch.float32)
    assert torch.equal(case.bounds, fresh)


def test_an_inactive_row_is_left_alone():
    case = step_case(lengths=[30, -1, 50], capacity=50)
    before = case.to("cpu")
    output, selected = reference_ops.compute("hybrid_attention", case.arguments())
    for name in ("k_cache", "v_cache", "bounds"):
        assert_same_bits(getattr(case, name)[1:], getattr(before, name)[1:], name)
    assert not output[1:].any()
    assert bool((selected[1:] == -1).all())
    assert output[0].any()
    idle = step_case(lengths=[-1])
    assert not reference_ops.dense_attention(**idle.dense_arguments()).any()
    assert not reference_ops.compute("hybrid_attention", idle.arguments())[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_channel_major_and_page_major_bounds_agree(dtype):
    low, high = torch.randn(2, 3, 5, 8).to(dtype).sort(dim=0).values
    low[0, 2], high[0, 2] = torch.inf, -torch.inf
    low, high = low[None], high[None]
    major = reference_ops.channel_major(low, high, dtype)
    assert major.shape == (1, 3, 16, 5 if dtype == torch.float32 else 8)
    lowest = torch.finfo(dtype).min
    assert bool((major[0, 0, :, 2] == lowest).all())
    assert bool((major[..., 5:] == lowest).all())
    again = reference_ops.page_major(major, 5)
    assert torch.equal(again[0], low)
    assert torch.equal(again[1], high)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_widened_and_rounded_once(dtype):
    case = step_case(lengths=[30, 7], dtype=dtype)
    wide = step_case(lengths=[30, 7], dtype=dtype)
    floats = {name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
              for name, value in wide.arguments().items()}  # fmt: skip
    bounds = floats["bounds"][..., : -(-wide.k_cache.shape[2] // wide.page_size)]
    floats["bounds"] = bounds.masked_fill(bounds == torch.finfo(dtype).min, LOWEST)
    expected, chosen = reference_ops.compute("hybrid_attention", floats)
    output, selected = reference_ops.compute("hybrid_attention", case.arguments())
    assert torch.equal(selected, chosen)
    assert torch.equal(output, expected.to(dtype))
    assert case.k_cache.dtype == dtype
