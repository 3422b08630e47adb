"""kvc_hybrid_attention against the reference: the same tokens, caches and bounds, the output within the bars."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import SCHEDULES, KernelLibrary
from kvc_trt.reference import page_bounds
from tests.plugins_cuda.cases import DTYPES, StepCase, step_case, with_key, without_pages
from tests.plugins_cuda.checks import assert_same_bits, check_hybrid

GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
PAGES = (1, 2, 3, 4, 5, 7, 16)


@st.composite
def steps(draw: Any, dtype: torch.dtype) -> StepCase:
    """Rows that end around page boundaries, inactive rows, exact ties, heads of opposite sign, zero channels."""
    group, kv_heads, page = draw(st.sampled_from(GROUPS)), draw(st.integers(1, 2)), draw(st.sampled_from(PAGES))
    size = draw(st.sampled_from((16, 24, 32, 40, 64, 80, 96, 128, 256)))
    capacity = draw(st.integers(1, 200))
    boundary = st.builds(lambda j, off: j * page + off, st.integers(0, -(-capacity // page)), st.integers(-1, 1))
    length = st.one_of(st.integers(0, capacity - 1), boundary.map(lambda x: min(max(x, -1), capacity)))
    case = step_case(
        lengths=draw(st.lists(length, min_size=1, max_size=3)), heads=group * kv_heads, kv_heads=kv_heads, size=size,
        capacity=capacity, page=page, top_r=draw(st.one_of(st.just(size), st.integers(1, size))),
        top_k=draw(st.integers(1, capacity)), token_budget=draw(st.one_of(st.just(0), st.integers(0, capacity + 3))),
        dense_until=draw(st.one_of(st.just(0), st.integers(0, capacity + 3))), dtype=dtype,
        seed=draw(st.integers(0, 2**31)), ties=draw(st.booleans()), opposite=group > 1 and draw(st.booleans()),
    )  # fmt: skip
    if draw(st.booleans()):
        case.query[:, :, draw(st.integers(0, size - 1)) :: 3] = 0
    return case


# The library keeps no state between examples.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_step(library: KernelLibrary, dtype: torch.dtype, data: st.DataObject) -> None:
    check_hybrid(library, data.draw(steps(dtype)))


def small(**changes: Any) -> StepCase:
    """A step whose long rows select: 2 KV heads of 4 query heads, pages of 3, 101 slots."""
    settings_ = {"lengths": (100, 64, 10), "heads": 8, "size": 64, "capacity": 101, "page": 3, "top_r": 23, "top_k": 16}
    return step_case(**(settings_ | {"token_budget": 16} | changes))


def run(library: KernelLibrary, case: StepCase) -> tuple[StepCase, Tensor, Tensor]:
    """(the case after the step, output, selected), on the CPU; the case itself stays as it is."""
    moved = case.to(library.device_type)
    output, selected = library.hybrid_attention(**moved.arguments())
    assert selected is not None
    return moved.to("cpu"), output.cpu(), selected.cpu()


def selected_tokens(library: KernelLibrary, case: StepCase) -> list[list[list[int]]]:
    _, _, selected = run(library, case)
    return [[[x for x in head if x >= 0] for head in row] for row in selected.tolist()]


def reference_tokens(case: StepCase) -> list[list[list[int]]]:
    _, selected = reference_ops.hybrid_attention(**case.to("cpu").arguments())
    return [[[x for x in head if x >= 0] for head in row] for row in selected.tolist()]


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
    bounds = reference_ops.channel_major(*page_bounds(k_cache, stored, 3), torch.float32)
    case = StepCase(
        query=torch.nn.functional.pad(2 * query, (0, 12))[None], k_new=torch.nn.functional.pad(keys[6:], (0, 12))[None],
        v_new=torch.full((1, 1, 16), 7.0), k_cache=k_cache, v_cache=v_cache, bounds=bounds, cache_lengths=stored,
        page_size=3, top_r=2, top_k=4, token_budget=0, dense_until=0,
    )  # fmt: skip
    return replace(case, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(scheduled_library: KernelLibrary, dtype: torch.dtype) -> None:
    case = golden()
    floats = ("query", "k_new", "v_new", "k_cache", "v_cache")
    bounds = reference_ops.channel_major(*page_bounds(case.k_cache, case.cache_lengths, 3), dtype)
    case = replace(case, bounds=bounds, **{name: getattr(case, name).to(dtype) for name in floats})
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


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_of_a_page_tie(library: KernelLibrary, dtype: torch.dtype, page: int) -> None:
    """Two distinct pages, repeated: every copy's score has the same bits, and the lowest copy wins."""
    for seed in range(2):
        case = small(page=page, ties=True, distinct=2, capacity=230, lengths=(229, 150), dtype=dtype, seed=seed)
        random = small(page=page, capacity=230, lengths=(229, 150), dtype=dtype, seed=seed)
        drawn = torch.randint(2, (2, 2, -(-230 // page), 1), generator=torch.Generator().manual_seed(seed))
        pages = random.k_cache[:, :, : 2 * page].reshape(2, 2, 2, -1)  # not dyadic: their scores are rounded
        keys = pages.gather(2, drawn.expand(-1, -1, -1, pages.shape[3])).reshape(2, 2, -1, 64)[:, :, :230].clone()
        bounds = reference_ops.channel_major(*page_bounds(keys.float(), random.cache_lengths, page), dtype)
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
def test_nan_in_a_key_of_a_chosen_channel(scheduled_library: KernelLibrary, dtype: torch.dtype) -> None:
    """The page's bound is NaN, hence every share: all pages rank equally, the lowest tokens are read."""
    case = with_key(small(top_r=64, dtype=dtype), slots=50, channel=7, value=math.nan)
    found = selected_tokens(scheduled_library, case)
    assert found == reference_tokens(case)
    assert found[0] == [list(range(16))] * 2
    _, output, _ = run(scheduled_library, case)
    assert not output.isnan().any(), "slot 50 is not among the tokens that were read"


def test_nan_in_a_channel_that_is_not_chosen(library: KernelLibrary) -> None:
    case = small(top_r=8)
    case.query[:, :, 7] = 0.001
    with_nan = with_key(case, slots=50, channel=7, value=math.nan)
    assert selected_tokens(library, with_nan) == selected_tokens(library, case) == reference_tokens(with_nan)


@pytest.mark.parametrize("where", ["appended key", "query", "value"])
def test_nan_in_what_arrives(library: KernelLibrary, where: str) -> None:
    case = small(top_r=64)
    {"appended key": case.k_new, "query": case.query, "value": case.v_new}[where][0, :, 5] = math.nan
    after, output, _ = run(library, case)
    assert selected_tokens(library, case) == reference_tokens(case)
    mine = case.to("cpu")
    reference_ops.hybrid_attention(**mine.arguments())
    for name in ("k_cache", "v_cache", "bounds"):
        assert_same_bits(getattr(after, name), getattr(mine, name), name)
    assert not output[1:].isnan().any(), "NaN of one row reached another"


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("slot", [0, 49, 50, 51, 99])
@pytest.mark.parametrize(("dtype", "top_r"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 49)])
def test_infinite_keys(
    scheduled_library: KernelLibrary, dtype: torch.dtype, top_r: int, slot: int, value: float
) -> None:
    """An infinite score makes its head NaN and the lowest tokens win; minus infinity drops the page."""
    case = with_key(small(dtype=dtype, top_r=top_r), slots=slot, channel=7, value=value)
    assert selected_tokens(scheduled_library, case) == reference_tokens(case)


@pytest.mark.parametrize("pages", [1, 8, 17, 24])
def test_pages_of_minus_infinity(scheduled_library: KernelLibrary, pages: int) -> None:
    """Whole units of pages that nothing looks at leave the others' shares as they are."""
    case = without_pages(small(), pages)
    found = selected_tokens(scheduled_library, case)
    assert found == reference_tokens(case)
    assert all(head[0] >= 3 * pages for head in found[0])
    check_hybrid(scheduled_library, case)


def test_minus_infinity_in_every_page(library: KernelLibrary) -> None:
    """No share is a number then: the lowest tokens are read."""
    case = without_pages(small(), 34)
    case.k_new[:, :, 0] = torch.finfo(torch.float32).min
    assert selected_tokens(library, case)[0] == reference_tokens(case)[0] == [list(range(16))] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_hangs_on_garbage(scheduled_library: KernelLibrary, dtype: torch.dtype) -> None:
    """NaN, infinities and the largest numbers everywhere: whatever is chosen is a list of stored tokens."""
    make = torch.Generator().manual_seed(3)
    for seed in range(4):
        case = small(dtype=dtype, seed=seed, lengths=(100, 99, 30))
        values = torch.tensor([math.nan, math.inf, -math.inf, torch.finfo(dtype).max, -1.0, 0.0, 1e-7]).to(dtype)
        for tensor in (case.query, case.k_new, case.k_cache, case.bounds):
            drawn = values[torch.randint(len(values), tensor.shape, generator=make)]
            tensor.copy_(torch.where(torch.rand(tensor.shape, generator=make) < 0.2, drawn, tensor))
        for row, tokens in enumerate(selected_tokens(scheduled_library, case)):
            length = int(case.cache_lengths[row]) + 1
            for head in tokens:
                assert len(head) == 16
                assert head == sorted(set(head))
                assert head[-1] < length


# ---- The append


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 3, 4])
def test_many_steps(library: KernelLibrary, dtype: torch.dtype, page: int) -> None:
    """From an empty cache to a full one and beyond: bounds raised step by step equal recomputed ones."""
    case = step_case(lengths=(0, 7), size=16, capacity=22, page=page, top_r=5, top_k=6, token_budget=9, dtype=dtype)
    moved = case.to(library.device_type)
    make = torch.Generator().manual_seed(1)
    for step in range(25):
        entries = {name: torch.randn(2, 2, 16, generator=make).to(dtype) for name in ("k_new", "v_new")}
        query = torch.randn(2, 4, 16, generator=make).to(dtype)
        lengths = case.cache_lengths + step
        before = replace(moved, query=query, cache_lengths=lengths, **entries).to("cpu")
        check_hybrid(library, before)
        library.hybrid_attention(**before.to(library.device_type).arguments() | _state(moved))
        stored = (lengths + 1).clamp(max=22)
        keys = moved.k_cache.cpu()
        expected = reference_ops.channel_major(*page_bounds(keys.float(), stored, page), dtype)
        assert_same_bits(moved.bounds.cpu(), expected, f"bounds after step {step}")
        for row in range(2):
            if lengths[row] < 22:
                assert torch.equal(keys[row, :, lengths[row]], entries["k_new"][row])
                assert torch.equal(moved.v_cache.cpu()[row, :, lengths[row]], entries["v_new"][row])


def _state(case: StepCase) -> dict[str, Tensor]:
    return {"k_cache": case.k_cache, "v_cache": case.v_cache, "bounds": case.bounds}


@pytest.mark.parametrize("lengths", [(0,), (100,), (101,), (-1,), (2**62,), (-1, 101), (0, -5, 100, 101)])
def test_first_and_last_slots_and_inactive_rows(library: KernelLibrary, lengths: tuple[int, ...]) -> None:
    check_hybrid(library, small(lengths=lengths))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_slot(library: KernelLibrary, dtype: torch.dtype) -> None:
    check_hybrid(library, step_case(lengths=(0, 1), capacity=1, top_k=1, token_budget=0, page=5, dtype=dtype))


def test_a_key_of_minus_infinity_leaves_the_lowest_finite_bound(library: KernelLibrary) -> None:
    """As an empty page holds it: the bounds are a maximum that starts there."""
    case = small(lengths=(99,))
    case.k_new[0, :, 3] = -math.inf
    after, _, _ = run(library, case)
    assert bool((after.bounds[0, :, 3, 33] == torch.finfo(torch.float32).min).all())
    assert bool((after.bounds[0, :, 64 + 3, 33] == math.inf).all())


# ---- Which rows select, and that the batch does not matter


@pytest.mark.parametrize(("budget", "until", "counts"), [(64, 0, (16, 64)), (0, 64, (16, 64)), (65, 3, (65, 64))])
def test_rows_within_the_limit_read_everything(
    library: KernelLibrary, budget: int, until: int, counts: tuple[int, int]
) -> None:
    case = small(lengths=(64, 63), token_budget=budget, dense_until=until)
    check_hybrid(library, case)
    assert [[len(head) for head in row] for row in selected_tokens(library, case)] == [[n, n] for n in counts]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_fits_equals_the_dense_operation(scheduled_library: KernelLibrary, dtype: torch.dtype) -> None:
    for changes in ({"token_budget": 101}, {"token_budget": 0, "dense_until": 101}, {"top_k": 101, "token_budget": 0}):
        case = small(dtype=dtype, lengths=(100, 40, 7), **changes)
        _, output, _ = run(scheduled_library, case)
        dense = scheduled_library.dense_attention(**case.to(scheduled_library.device_type).dense_arguments()).cpu()
        assert torch.equal(output, dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ties", [False, True])
def test_a_row_alone_has_the_bits_of_the_batch(library: KernelLibrary, dtype: torch.dtype, ties: bool) -> None:
    case = small(lengths=(100, -1, 64, 10, 99), dtype=dtype, ties=ties)
    together, output, selected = run(library, case)
    for row in range(5):
        alone = replace(case, **{name: tensor[row : row + 1] for name, tensor in _tensors(case).items()})
        after, own, chosen = run(library, alone)
        assert torch.equal(chosen[0], selected[row])
        assert torch.equal(own[0], output[row])
        for name in _state(case):
            assert_same_bits(getattr(after, name)[0], getattr(together, name)[row], name)


def test_larger_chunks_of_a_larger_batch_change_nothing(library: KernelLibrary) -> None:
    """Blocks take more pages where there are enough of them; the scores keep their bits."""
    lengths = (1299, *[5] * 43)
    case = step_case(
        lengths=lengths, kv_heads=4, size=16, capacity=1300, page=1, top_r=9, top_k=40, token_budget=40,
        dtype=torch.bfloat16,
    )  # fmt: skip
    _, output, selected = run(library, case)
    alone = replace(case, **{name: tensor[:1] for name, tensor in _tensors(case).items()})
    if library.executor == "emulation":
        assert _page_blocks(library, case) == 3
        assert _page_blocks(library, alone) > 3
    _, own, chosen = run(library, alone)
    assert torch.equal(own[0], output[0])
    assert torch.equal(chosen[0], selected[0])
    assert check_hybrid(library, alone).near_ties == 0 or library.executor == "cuda"


def _tensors(case: StepCase) -> dict[str, Tensor]:
    return {name: value for name, value in case.arguments().items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 4, 7])
def test_schedules_agree_on_every_bit(emulation: KernelLibrary, dtype: torch.dtype, page: int) -> None:
    case = small(dtype=dtype, page=page, capacity=300, lengths=(299, 150, 3), heads=6)
    results = []
    for order in SCHEDULES:
        emulation.set_schedule(order, seed=7)
        after, output, selected = run(emulation, case)
        results.append([after.k_cache, after.v_cache, after.bounds, output, selected])
    emulation.set_schedule("forward")
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same_bits(one, two, "a result")


# ---- Sizes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 8, 16])
@pytest.mark.parametrize("pages", [1, 7, 8, 9, 15, 16, 17, 24, 120, 121, 127, 128, 129, 136, 145, 255, 256])
def test_the_last_tile_of_pages(library: KernelLibrary, pages: int, heads: int, dtype: torch.dtype) -> None:
    """Around units of 8 pages, a warp's 16, a block's 128; a last step of 16 channels with few of them and many."""
    for top_r in (1, 15, 16, 17, 40):
        lengths = (2 * pages - 1, pages)
        case = step_case(
            lengths=lengths, heads=heads, kv_heads=1, size=40, capacity=2 * pages, page=2, top_r=top_r, top_k=pages,
            token_budget=0, dtype=dtype, seed=pages,
        )  # fmt: skip
        check_hybrid(library, case)


@pytest.mark.parametrize("shift", range(8))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_pages_score_equally_wherever_they_are(library: KernelLibrary, dtype: torch.dtype, shift: int) -> None:
    """All pages are copies of one: of any lane, unit, warp and block."""
    pages = 520 + shift
    case = step_case(
        lengths=(2 * pages - 2,), heads=6, kv_heads=1, size=24, capacity=2 * pages, page=2, top_r=19, top_k=200,
        token_budget=0, dtype=dtype, seed=shift,
    )  # fmt: skip
    key = case.k_cache[:, :, :1].clone()
    case.k_cache[:, :, :-2] = key
    case.k_new.copy_(key[:, :, 0])
    bounds = reference_ops.channel_major(*page_bounds(case.k_cache.float(), case.cache_lengths, 2), dtype)
    assert selected_tokens(library, replace(case, bounds=bounds)) == [[list(range(200))]]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e4])
@pytest.mark.parametrize("pages", [1, 7, 8, 9, 15, 16, 17, 127, 128, 129])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_past_the_last_slot_are_neither_scored_nor_changed(
    library: KernelLibrary, dtype: torch.dtype, pages: int, poison: float
) -> None:
    """Whatever their bounds are: those of a full row, and of one whose last pages are empty."""
    case = step_case(
        lengths=(3 * pages - 1, 2 * pages), size=24, capacity=3 * pages, page=3, top_r=7, top_k=2 * pages,
        token_budget=0, dtype=dtype, seed=pages,
    )  # fmt: skip
    stored = case.bounds.shape[3]
    assert stored == (pages if dtype == torch.float32 else -(-pages // 8) * 8)
    after, output, selected = run(library, case)
    case.bounds[..., pages:] = poison
    poisoned, same_output, same_selected = run(library, case)
    assert torch.equal(selected, same_selected)
    assert_same_bits(output, same_output, "output")
    assert_same_bits(poisoned.bounds[..., :pages], after.bounds[..., :pages], "bounds")
    assert_same_bits(poisoned.bounds[..., pages:], case.bounds[..., pages:], "bounds past the last slot")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups(library: KernelLibrary, group: int, dtype: torch.dtype) -> None:
    check_hybrid(library, small(heads=2 * group, dtype=dtype))


@pytest.mark.parametrize("size", range(16, 257, 8))
def test_head_sizes(library: KernelLibrary, size: int) -> None:
    for dtype, r in ((torch.bfloat16, size), (torch.float16, size // 2 + 1), (torch.float32, 3)):
        check_hybrid(library, small(size=size, top_r=r, dtype=dtype, lengths=(100, 40)))


@pytest.mark.parametrize(
    ("capacity", "page"), [(2048, 1), (2049, 1), (4096, 1), (4097, 1), (16384, 1), (16385, 1), (40000, 2)]
)
def test_many_pages(library: KernelLibrary, capacity: int, page: int) -> None:
    """The selection's keys are in registers, 4 or 8 of each thread, then in shared memory, then in the workspace."""
    case = step_case(
        lengths=(capacity - 1, capacity // 3), heads=2, kv_heads=1, size=16, capacity=capacity, page=page, top_r=4,
        top_k=700, token_budget=100, dtype=torch.float16,
    )  # fmt: skip
    check_hybrid(library, case)
    ties = step_case(
        lengths=(capacity - 1,), heads=1, kv_heads=1, size=16, capacity=capacity, page=page, top_r=16, top_k=700,
        token_budget=100, ties=True, distinct=3,
    )  # fmt: skip
    assert check_hybrid(library, ties).near_ties == 0


@pytest.mark.parametrize("page", [50, 99, 100, 101, 1000])
def test_few_large_pages(library: KernelLibrary, page: int) -> None:
    check_hybrid(library, small(page=page))


def test_the_largest_page(library: KernelLibrary) -> None:
    """One page that holds all slots: its bounds are the same whatever its size."""
    case = small(page=101)
    _, output, selected = run(library, case)
    _, same, chosen = run(library, replace(case, page_size=2**31 - 1))
    assert torch.equal(selected, chosen)
    assert torch.equal(output, same)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_selected(library: KernelLibrary, dtype: torch.dtype) -> None:
    case = small(dtype=dtype)
    after, output, _ = run(library, case)
    moved = case.to(library.device_type)
    same, selected = library.hybrid_attention(**moved.arguments(), with_selected=False)
    assert selected is None
    assert torch.equal(output, same.cpu())
    for name in _state(case):
        assert_same_bits(getattr(after, name), getattr(moved, name).cpu(), name)


def test_the_selected_list_is_written_to_its_end(library: KernelLibrary) -> None:
    case = small(token_budget=80, top_k=16)
    _, _, selected = run(library, case)
    assert selected.shape == (3, 2, 80)
    assert [(row >= 0).sum(-1).tolist() for row in selected] == [[16, 16], [65, 65], [11, 11]]
    assert bool((selected[2, :, 11:] == -1).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [16, 400])
def test_a_block_takes_several_splits_of_a_long_row_within_the_budget(
    scheduled_library: KernelLibrary, top_k: int, dtype: torch.dtype
) -> None:
    """Blocks are launched for the splits of a sparse row. The dense operation has one for each split, and its bits."""
    case = small(lengths=(700, 300, 699), capacity=701, top_k=top_k, token_budget=701, dtype=dtype)
    _, output, selected = run(scheduled_library, case)
    dense = scheduled_library.dense_attention(**case.to(scheduled_library.device_type).dense_arguments()).cpu()
    assert torch.equal(output, dense)
    assert torch.equal(selected[0], torch.arange(701).expand(2, -1).int())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_longer_than_a_block_holds_of_it(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Splits of 384 tokens, whose list a block reads in parts of 256."""
    case = step_case(
        lengths=[16500, 16400], heads=2, kv_heads=1, size=16, page=64, top_k=16385, token_budget=0, dtype=dtype
    )  # fmt: skip
    assert not check_hybrid(library, case).near_ties


# ---- Launches


def _launches(library: KernelLibrary, case: StepCase) -> list[tuple[str, tuple[int, ...]]]:
    launches = library.launches_of(lambda: run(library, case))
    return [(launch.name.decode(), tuple(launch.grid)) for launch in launches]


def _page_blocks(library: KernelLibrary, case: StepCase) -> int:
    return _launches(library, case)[0][1][0]


def test_launches_depend_on_sizes_alone(emulation: KernelLibrary) -> None:
    """So that a captured CUDA graph serves every length."""
    launches = [_launches(emulation, small(lengths=lengths)) for lengths in ((100, 64, 10), (0, -1, 3), (101, -1, -1))]
    assert launches[0] == launches[1] == launches[2]
    assert [name for name, _ in launches[0]] == ["page_scores", "select_tokens", "sparse_attention"]
    assert launches[0][0][1] == (1, 2, 3), "pages, KV heads, rows"
    assert launches[0][1][1] == (2, 3, 1)


def test_blocks_of_the_attention_are_those_of_the_rows_that_are_read_most_often(emulation: KernelLibrary) -> None:
    """Splits are of 128 tokens beyond 256: of a sparse row, or of the rows that `dense_until` adds to the budget's."""

    def splits(**changes: int) -> int:
        return _launches(emulation, small(lengths=(100, -1, 3), capacity=701, **changes))[2][1][2]

    assert splits(top_k=16, token_budget=700, dense_until=0) == 1
    assert splits(top_k=16, token_budget=700, dense_until=700) == 1
    assert splits(top_k=300, token_budget=700, dense_until=0) == 3
    assert splits(top_k=16, token_budget=400, dense_until=700) == 6
