"""kvc_hybrid_attention against the reference: the same tokens, caches and bounds, the output within the bars."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.cases import DTYPES, FP8, StepCase, bounds_of, step_case, with_key, without_pages
from tests.plugins_cuda.checks import assert_same_bits, check_hybrid
from tests.plugins_cuda.hybrid_steps import PAGES, reference_tokens, run, selected_tokens, small, state_of, steps


# The library keeps no state between examples.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_steps_equal_the_reference(library: KernelLibrary, dtype: torch.dtype, data: st.DataObject) -> None:
    check_hybrid(library, data.draw(steps(dtype)))


# ---- Goldens and edges of the rule


def golden(**changes: Any) -> StepCase:
    """Algorithm note, section 4: g = 2, D = 4, m = 7, p = 3, r = 2, k = 4.

    Kernels start at D = 16. Twelve zero channels more leave the chosen channels as they are and double both T and
    sqrt(D), so a doubled query has the note's page scores and its attention.
    """
    keys = torch.tensor(
        [[1, 0, 0, 0], [0, 1, 0, 0], [2, 0, 1, 1], [3, 0, 0, -1], [0, 0, 2, 0], [1, 1, 0, 2], [2, -1, 0, 0]]
    ).float()
    query = torch.tensor([[4, -1, 0, 2], [2, -1, 0, -4]]).float()
    k_cache, v_cache = torch.zeros(1, 1, 7, 16), torch.zeros(1, 1, 7, 16)
    k_cache[0, 0, :6, :4] = keys[:6]
    v_cache[0, 0, :6] = torch.arange(1.0, 7.0)[:, None]
    stored = torch.tensor([6])
    case = StepCase(
        query=torch.nn.functional.pad(2 * query, (0, 12))[None], k_new=torch.nn.functional.pad(keys[6:], (0, 12))[None],
        v_new=torch.full((1, 1, 16), 7.0), k_cache=k_cache, v_cache=v_cache,
        bounds=bounds_of(k_cache, stored, 3), cache_lengths=stored, page_size=3, top_r=2, top_k=4, token_budget=0,
        dense_until=0,
    )  # fmt: skip
    return replace(case, **changes)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_golden_case_matches(scheduled_library: KernelLibrary, fp8: bool, dtype: torch.dtype) -> None:
    """All bounds of the golden case are numbers of fp8."""
    case = golden()
    floats = ("query", "k_new", "v_new", "k_cache", "v_cache")
    bounds = bounds_of(case.k_cache.to(dtype), case.cache_lengths, 3, fp8=fp8)
    converted = {name: getattr(case, name).to(dtype) for name in floats}
    case = replace(case, bounds=bounds, fp8_bounds=int(fp8), **converted)
    _, output, selected = run(scheduled_library, case)
    assert selected.tolist() == [[[0, 3, 4, 5]]]
    bar = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 0}
    wanted = torch.tensor([4.237280, 3.953375])[:, None].expand(2, 16)
    bar = bar | ({"rtol": 4e-3} if dtype == torch.bfloat16 else {})  # half a bf16 step of 4.2 is 3.7e-3 of it
    torch.testing.assert_close(output[0].float(), wanted, **bar)
    _, dense, _ = run(scheduled_library, replace(case, token_budget=7))
    torch.testing.assert_close(dense[0].float(), torch.tensor([4.385796, 4.164145])[:, None].expand(2, 16), **bar)


def test_a_zero_query_ties_every_page(library: KernelLibrary) -> None:
    case = small(lengths=(100, 64))
    case.query.zero_()
    assert selected_tokens(library, case) == [[list(range(16))] * 2] * 2
    check_hybrid(library, case)


def test_a_group_sum_of_zero_reads_the_minimum(library: KernelLibrary) -> None:
    """Heads that cancel exactly: for them the bound is the minimum, whichever sign a head has."""
    case = small(heads=2, kv_heads=1, opposite=True, ties=True)
    assert bool((case.query[:, 0] == -case.query[:, 1]).all())
    assert check_hybrid(library, case).near_ties == 0


@pytest.mark.pairwise
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_copies_of_a_page_tie_and_the_lowest_wins(
    library: KernelLibrary, fp8: bool, dtype: torch.dtype, page: int
) -> None:
    """Two distinct pages, repeated: every copy's score has the same bits, and the lowest copy wins."""
    for seed in range(2):
        sizes = {"page": page, "capacity": 230, "lengths": (229, 150), "dtype": dtype, "seed": seed, "fp8": fp8}
        case, random = small(ties=True, distinct=2, **sizes), small(**sizes)
        drawn = torch.randint(2, (2, 2, -(-230 // page), 1), generator=torch.Generator().manual_seed(seed))
        pages = random.k_cache[:, :, : 2 * page].reshape(2, 2, 2, -1)  # not dyadic: their scores are rounded
        keys = pages.gather(2, drawn.expand(-1, -1, -1, pages.shape[3])).reshape(2, 2, -1, 64)[:, :, :230].clone()
        bounds = bounds_of(keys, random.cache_lengths, page, fp8=fp8)
        for one in (case, replace(random, k_cache=keys, bounds=bounds)):
            compared = check_hybrid(library, one)
            assert (compared.near_ties, compared.upwards) == (0, 0)


@pytest.mark.parametrize("r", [1, 2, 31, 32, 33, 63, 64])
def test_equal_channels_are_chosen_from_below(library: KernelLibrary, r: int) -> None:
    """|q| has two values only, so the choice of channels is all ties; keys that differ per channel show the choice."""
    case = small(top_r=r, top_k=5, token_budget=0)
    case.query.sign_()
    case.query[:, :, 1::2] /= 2
    assert check_hybrid(library, case).near_ties == 0


# ---- NaN and infinities


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_chosen_channel_makes_all_pages_rank_equally(
    scheduled_library: KernelLibrary, dtype: torch.dtype
) -> None:
    """The page's bound is NaN, hence every share: all pages rank equally, the lowest tokens are read."""
    case = with_key(small(top_r=64, dtype=dtype), slots=50, channel=7, value=math.nan)
    found = selected_tokens(scheduled_library, case)
    assert found == reference_tokens(case)
    assert found[0] == [list(range(16))] * 2
    _, output, _ = run(scheduled_library, case)
    assert not output.isnan().any(), "slot 50 is not among the tokens that were read"


def test_nan_in_a_channel_that_is_not_chosen_changes_no_selection(library: KernelLibrary) -> None:
    case = small(top_r=8)
    case.query[:, :, 7] = 0.001
    with_nan = with_key(case, slots=50, channel=7, value=math.nan)
    assert selected_tokens(library, with_nan) == selected_tokens(library, case) == reference_tokens(with_nan)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_key_promises_the_most_in_fp8(scheduled_library: KernelLibrary, dtype: torch.dtype) -> None:
    """The bound is not NaN: every head ranks the page first, or last where it looks away from the bound."""
    case = with_key(small(top_r=64, dtype=dtype, fp8=True), slots=50, channel=7, value=math.nan)
    found = selected_tokens(scheduled_library, case)
    assert found == reference_tokens(case)
    assert found[0] != [list(range(16))] * 2


@pytest.mark.parametrize("where", ["appended key", "query", "value"])
@FP8
def test_nan_in_the_new_token_selects_as_the_reference(library: KernelLibrary, fp8: bool, where: str) -> None:
    case = small(top_r=64, fp8=fp8)
    {"appended key": case.k_new, "query": case.query, "value": case.v_new}[where][0, :, 5] = math.nan
    after, output, _ = run(library, case)
    assert selected_tokens(library, case) == reference_tokens(case)
    mine = case.to("cpu")
    reference_ops.compute("hybrid_attention", mine.arguments())
    for name in ("k_cache", "v_cache", "bounds"):
        assert_same_bits(getattr(after, name), getattr(mine, name), name)
    assert not output[1:].isnan().any(), "NaN of one row reached another"


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("slot", [0, 49, 50, 51, 99])
@pytest.mark.parametrize(("dtype", "top_r"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 49)])
@FP8
def test_infinite_keys_select_as_the_reference(
    scheduled_library: KernelLibrary, fp8: bool, dtype: torch.dtype, top_r: int, slot: int, value: float
) -> None:
    """An infinite score makes its head NaN and the lowest tokens win; minus infinity drops the page. In fp8 there are
    none: the page is ranked by the largest number."""
    case = with_key(small(dtype=dtype, top_r=top_r, fp8=fp8), slots=slot, channel=7, value=value)
    assert selected_tokens(scheduled_library, case) == reference_tokens(case)


@pytest.mark.parametrize("pages", [1, 8, 17, 24])
def test_pages_of_minus_infinity_are_not_selected(scheduled_library: KernelLibrary, pages: int) -> None:
    """Whole units of pages that nothing looks at leave the others' shares as they are."""
    case = without_pages(small(), pages)
    found = selected_tokens(scheduled_library, case)
    assert found == reference_tokens(case)
    assert all(head[0] >= 3 * pages for head in found[0])
    check_hybrid(scheduled_library, case)


def test_minus_infinity_in_every_page_reads_the_lowest_tokens(library: KernelLibrary) -> None:
    """No share is a number then, so the lowest tokens are read."""
    case = without_pages(small(), 34)
    case.k_new[:, :, 0] = torch.finfo(torch.float32).min
    assert selected_tokens(library, case)[0] == reference_tokens(case)[0] == [list(range(16))] * 2


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_garbage_still_selects_stored_tokens(scheduled_library: KernelLibrary, fp8: bool, dtype: torch.dtype) -> None:
    """NaN, infinities and the largest numbers everywhere, any codes: whatever is chosen is a list of stored tokens."""
    make = torch.Generator().manual_seed(3)
    for seed in range(4):
        case = small(dtype=dtype, seed=seed, lengths=(100, 99, 30), fp8=fp8)
        values = torch.tensor([math.nan, math.inf, -math.inf, torch.finfo(dtype).max, -1.0, 0.0, 1e-7]).to(dtype)
        if fp8:
            case.bounds.copy_(torch.randint(-128, 128, case.bounds.shape, generator=make))
        for tensor in (case.query, case.k_new, case.k_cache, *(() if fp8 else (case.bounds,))):
            drawn = values[torch.randint(len(values), tensor.shape, generator=make)]
            tensor.copy_(torch.where(torch.rand(tensor.shape, generator=make) < 0.2, drawn, tensor))
        for row, tokens in enumerate(selected_tokens(scheduled_library, case)):
            length = int(case.cache_lengths[row]) + 1
            for head in tokens:
                assert len(head) == 16
                assert head == sorted(set(head))
                assert head[-1] < length


# ---- The append


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 3, 4])
@FP8
def test_bounds_raised_step_by_step_equal_recomputed_ones(
    library: KernelLibrary, fp8: bool, dtype: torch.dtype, page: int
) -> None:
    """From an empty cache to a full one and beyond: bounds raised step by step equal recomputed ones."""
    case = step_case(
        lengths=(0, 7), size=16, capacity=22, page=page, top_r=5, top_k=6, token_budget=9, dtype=dtype, fp8=fp8
    )
    moved = case.to(library.device_type)
    make = torch.Generator().manual_seed(1)
    for step in range(25):
        entries = {name: torch.randn(2, 2, 16, generator=make).to(dtype) for name in ("k_new", "v_new")}
        query = torch.randn(2, 4, 16, generator=make).to(dtype)
        lengths = case.cache_lengths + step
        before = replace(moved, query=query, cache_lengths=lengths, **entries).to("cpu")
        check_hybrid(library, before)
        library.hybrid_attention(**before.to(library.device_type).arguments() | state_of(moved))
        stored = (lengths + 1).clamp(max=22)
        keys = moved.k_cache.cpu()
        expected = bounds_of(keys, stored, page, fp8=fp8)
        assert_same_bits(moved.bounds.cpu(), expected, f"bounds after step {step}")
        for row in range(2):
            if lengths[row] < 22:
                assert torch.equal(keys[row, :, lengths[row]], entries["k_new"][row])
                assert torch.equal(moved.v_cache.cpu()[row, :, lengths[row]], entries["v_new"][row])


@pytest.mark.parametrize("lengths", [(0,), (100,), (101,), (-1,), (2**62,), (-1, 101), (0, -5, 100, 101)])
def test_first_slots_last_slots_and_inactive_rows_equal_the_reference(
    library: KernelLibrary, lengths: tuple[int, ...]
) -> None:
    check_hybrid(library, small(lengths=lengths))


@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_a_cache_of_one_slot_equals_the_reference(library: KernelLibrary, fp8: bool, dtype: torch.dtype) -> None:
    check_hybrid(library, step_case(lengths=(0, 1), capacity=1, top_k=1, token_budget=0, page=5, dtype=dtype, fp8=fp8))


def test_a_key_of_minus_infinity_leaves_the_lowest_finite_bound(library: KernelLibrary) -> None:
    """The bound is that of an empty page: it is a maximum that starts there."""
    case = small(lengths=(99,))
    case.k_new[0, :, 3] = -math.inf
    after, _, _ = run(library, case)
    assert bool((after.bounds[0, :, 3, 33] == torch.finfo(torch.float32).min).all())
    assert bool((after.bounds[0, :, 64 + 3, 33] == math.inf).all())
