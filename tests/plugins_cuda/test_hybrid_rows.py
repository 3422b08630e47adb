"""kvc_hybrid_attention row by row: which rows select, and that neither batch, schedule nor length matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvc_trt.kernels.library import SCHEDULES, KernelLibrary
from tests.plugins_cuda.cases import DTYPES, FP8, step_case
from tests.plugins_cuda.checks import assert_same_bits, check_hybrid
from tests.plugins_cuda.hybrid_steps import launches_of, page_blocks, run, selected_tokens, small, state_of, tensors_of


@pytest.mark.parametrize(("budget", "until", "counts"), [(64, 0, (16, 64)), (0, 64, (16, 64)), (65, 3, (65, 64))])
def test_rows_within_the_limit_read_everything(
    library: KernelLibrary, budget: int, until: int, counts: tuple[int, int]
) -> None:
    case = small(lengths=(64, 63), token_budget=budget, dense_until=until)
    check_hybrid(library, case)
    assert [[len(head) for head in row] for row in selected_tokens(library, case)] == [[n, n] for n in counts]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_a_row_that_fits_equals_the_dense_operation(
    scheduled_library: KernelLibrary, fp8: bool, dtype: torch.dtype
) -> None:
    for changes in ({"token_budget": 101}, {"token_budget": 0, "dense_until": 101}, {"top_k": 101, "token_budget": 0}):
        case = small(dtype=dtype, lengths=(100, 40, 7), fp8=fp8, **changes)
        _, output, _ = run(scheduled_library, case)
        dense = scheduled_library.dense_attention(**case.to(scheduled_library.device_type).dense_arguments()).cpu()
        assert torch.equal(output, dense)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ties", [False, True])
@FP8
def test_a_row_alone_has_the_bits_of_the_batch(
    library: KernelLibrary, fp8: bool, dtype: torch.dtype, ties: bool
) -> None:
    case = small(lengths=(100, -1, 64, 10, 99), dtype=dtype, ties=ties, fp8=fp8)
    together, output, selected = run(library, case)
    for row in range(5):
        alone = replace(case, **{name: tensor[row : row + 1] for name, tensor in tensors_of(case).items()})
        after, own, chosen = run(library, alone)
        assert torch.equal(chosen[0], selected[row])
        assert torch.equal(own[0], output[row])
        for name in state_of(case):
            assert_same_bits(getattr(after, name)[0], getattr(together, name)[row], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [
        *((dtype, False) for dtype in DTYPES),
        (torch.bfloat16, True),
        *(pytest.param(dtype, True, marks=pytest.mark.exhaustive) for dtype in DTYPES if dtype != torch.bfloat16),
    ],
)
def test_larger_chunks_of_a_larger_batch_change_nothing(library: KernelLibrary, dtype: torch.dtype, fp8: bool) -> None:
    """Blocks take more pages where there are enough of them; the scores keep their bits."""
    vector = 16 if fp8 else 4 if dtype == torch.float32 else 8
    pages = 162 * vector
    lengths = (pages - 1, *[5] * 43)
    case = step_case(
        lengths=lengths, kv_heads=4, size=16, capacity=pages, page=1, top_r=9, top_k=40, token_budget=40, dtype=dtype,
        fp8=fp8,
    )  # fmt: skip
    _, output, selected = run(library, case)
    alone = replace(case, **{name: tensor[:1] for name, tensor in tensors_of(case).items()})
    if library.executor == "emulation":
        assert page_blocks(library, case) == 3
        assert page_blocks(library, alone) > 3
    _, own, chosen = run(library, alone)
    assert torch.equal(own[0], output[0])
    assert torch.equal(chosen[0], selected[0])
    assert check_hybrid(library, alone).near_ties == 0 or library.executor == "cuda"


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 4, 7])
@FP8
def test_schedules_agree_on_every_bit(emulation: KernelLibrary, fp8: bool, dtype: torch.dtype, page: int) -> None:
    case = small(dtype=dtype, page=page, capacity=300, lengths=(299, 150, 3), heads=6, fp8=fp8)
    results = []
    for order in SCHEDULES:
        emulation.set_schedule(order, seed=7)
        after, output, selected = run(emulation, case)
        results.append([after.k_cache, after.v_cache, after.bounds, output, selected])
    emulation.set_schedule("forward")
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same_bits(one, two, "a result")


# ---- Launches


def test_launches_depend_on_sizes_alone(emulation: KernelLibrary) -> None:
    """Launches that depend on sizes alone let a captured CUDA graph serve every length."""
    launches = [
        launches_of(emulation, small(lengths=lengths)) for lengths in ((100, 64, 10), (0, -1, 3), (101, -1, -1))
    ]
    assert launches[0] == launches[1] == launches[2]
    assert [name for name, _ in launches[0]] == ["prepare_step", "page_scores", "select_tokens", "sparse_attention"]
    grids = dict(launches[0])
    assert grids["page_scores"] == (1, 2, 3), "pages, KV heads, rows"
    assert grids["prepare_step"] == grids["select_tokens"] == (2, 3, 1)


def test_blocks_of_the_attention_are_those_of_the_rows_that_are_read_most_often(emulation: KernelLibrary) -> None:
    """Splits are of 128 tokens beyond 256: of a sparse row, or of the rows that `dense_until` adds to the budget's."""

    def splits(**changes: int) -> int:
        return launches_of(emulation, small(lengths=(100, -1, 3), capacity=701, **changes))[-1][1][2]

    assert splits(top_k=16, token_budget=700, dense_until=0) == 1
    assert splits(top_k=16, token_budget=700, dense_until=700) == 1
    assert splits(top_k=300, token_budget=700, dense_until=0) == 3
    assert splits(top_k=16, token_budget=400, dense_until=700) == 6
