"""kvc_compact_turn: each row compacts stored and new tokens with as many voting queries as its turn has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import CompactResult, KernelLibrary
from kvc_trt.operators.compaction.compact import COMPACT_TURN
from tests.near_ties import compare_compaction
from tests.plugins_cuda.cases import DTYPES, FP8, CompactCase, bounds_of, compact_case
from tests.plugins_cuda.checks import assert_same_bits, run_compact, truncates


@dataclass(frozen=True, kw_only=True)
class TurnCase(CompactCase):
    """Arguments of kvc_compact_turn."""

    window_lengths: Tensor

    def turn_arguments(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def turn_case(lengths: Sequence[int], voting: Sequence[int], *, silent: float = math.nan, **options: Any) -> TurnCase:
    """`silent` fills the queries of the window that are not the row's own."""
    case = compact_case(lengths=lengths, **options)
    for row, count in enumerate(voting):
        case.q_window[row, :, : case.q_window.shape[2] - count] = silent
    return TurnCase(**case.arguments(), window_lengths=torch.tensor(voting))


def run_turn(library: KernelLibrary, case: TurnCase) -> CompactResult:
    given_ = {
        name: value.to(library.device_type) if isinstance(value, Tensor) else value
        for name, value in case.turn_arguments().items()
    }
    return CompactResult(*(value.cpu() for value in library.compute(COMPACT_TURN, given_).values()))


def check_turn(library: KernelLibrary, case: TurnCase) -> CompactResult:
    """The reference's tokens, or proven near-ties of them; caches and bounds follow bit by bit."""
    found, expected = run_turn(library, case), reference_ops.compute("compact_turn", case.turn_arguments())
    assert torch.equal(found.cache_lengths, expected.cache_lengths)
    for row, (n, count) in enumerate(zip(case.prompt_lengths.tolist(), case.window_lengths.tolist(), strict=True)):
        if n == 0:
            assert bool((found.indices[row] == -1).all())
            continue
        one = slice(row, row + 1)
        voting = case.q_window[one, :, case.q_window.shape[2] - count :]
        compared = compare_compaction(
            voting.float().numpy(), case.k[one].float().nan_to_num().numpy(), case.prompt_lengths[one].numpy(),
            expected.indices[one].numpy(), found.indices[one].numpy(), pool_kernel=case.pool_kernel,
            truncates=truncates(library, case.k.dtype),
        )  # fmt: skip
        assert not compared.wrong, compared.wrong
    kept = found.indices >= 0
    assert torch.equal(kept.sum(-1), expected.cache_lengths[:, None].expand(kept.shape[:2]))
    assert bool((found.indices.diff(dim=-1) > 0).logical_or(~kept[..., 1:]).all()), "indices do not ascend"
    where = found.indices.clamp(min=0).long()[..., None].expand(-1, -1, -1, case.k.shape[3])
    for name, source in (("k", case.k), ("v", case.v)):
        gathered = torch.where(kept[..., None], source.gather(2, where), torch.zeros((), dtype=source.dtype))
        assert_same_bits(getattr(found, f"{name}_cache"), gathered, f"{name}_cache")
    bounds = bounds_of(found.k_cache, found.cache_lengths, case.page_size, fp8=case.fp8_bounds)
    assert_same_bits(found.bounds, bounds, "bounds")
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", [1, 5, 63])
def test_rows_with_windows_of_their_own_equal_the_reference(
    scheduled_library: KernelLibrary, dtype: torch.dtype, pool: int
) -> None:
    sizes = {"pool": pool, "size": 64, "seed": pool, "fp8": pool == 5}
    check_turn(scheduled_library, turn_case([150, 24, 90, 25], [8, 3, 1, 7], dtype=dtype, **sizes))


def test_the_queries_of_earlier_turns_do_not_matter(library: KernelLibrary) -> None:
    """Whatever is left of a shorter turn's own queries: nothing, NaN or infinity."""
    cases = [turn_case([150, 90], [3, 1], silent=value) for value in (0.0, math.nan, math.inf, 3e38)]
    first, *others = (run_turn(library, case) for case in cases)
    for other in others:
        for name, one, two in zip(CompactResult._fields, first, other, strict=True):
            assert_same_bits(one, two, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@FP8
def test_a_whole_window_is_that_of_a_prompt(library: KernelLibrary, fp8: bool, dtype: torch.dtype) -> None:
    """kvc_compact on the same tokens, bit for bit."""
    case = turn_case([200, 40, 9], [8, 8, 8], dtype=dtype, fp8=fp8)
    prompt = CompactCase(**{f.name: getattr(case, f.name) for f in fields(CompactCase)})
    for name, one, two in zip(
        CompactResult._fields, run_turn(library, case), run_compact(library, prompt), strict=True
    ):
        assert_same_bits(one, two, name)


def test_the_tokens_of_a_turn_stay(library: KernelLibrary) -> None:
    """As many tokens stay as vote: the last ones of the row."""
    found = run_turn(library, turn_case([150, 90], [3, 8]))
    assert found.indices[0, 0, 21:24].tolist() == [147, 148, 149]
    assert found.indices[1, 0, 16:24].tolist() == list(range(82, 90))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lowest(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Exact inputs: every index is the reference's."""
    case = turn_case([200, 131, 90], [8, 2, 1], ties=True, dtype=dtype, pool=3)
    found, expected = check_turn(library, case), reference_ops.compute("compact_turn", case.turn_arguments())
    assert torch.equal(found.indices, expected.indices)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes_equal_the_reference(library: KernelLibrary, data: st.DataObject) -> None:
    group, kv_heads = data.draw(st.sampled_from((1, 2, 3, 4, 8, 16))), data.draw(st.integers(1, 3))
    window = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(0, 260), min_size=1, max_size=3))
    voting = [data.draw(st.integers(1, max(1, min(window, n)))) for n in lengths]
    longest = max(*lengths, 1) + data.draw(st.integers(0, 3))
    budget = data.draw(st.integers(min(window, longest), max(window, longest + 2)))
    case = turn_case(
        lengths, voting, heads=group * kv_heads, kv_heads=kv_heads,
        size=data.draw(st.sampled_from((16, 32, 80, 128, 256))), window=window, length=longest, budget=budget,
        capacity=budget + data.draw(st.integers(0, 9)), pool=2 * data.draw(st.integers(0, 40)) + 1,
        page=data.draw(st.sampled_from((1, 3, 4, 23, 200))), dtype=data.draw(st.sampled_from(DTYPES)),
        seed=data.draw(st.integers(0, 2**31)), ties=data.draw(st.booleans()), fp8=data.draw(st.booleans()),
    )  # fmt: skip
    check_turn(library, case)
