"""Compactions and turns of caches in a format: what is kept is stored once, what is stored moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.operators.compaction.compact import COMPACT, COMPACT_TURN, STORED_KEYS, STORED_VALUES
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, RAISE_BOUNDS
from kvc_trt.operators.turns.join_block import JOIN_BLOCK, JOINED_KEYS, JOINED_VALUES
from kvc_trt.operators.turns.replace import K_KEPT, REPLACE_CACHE, V_KEPT
from tests.plugins_cuda.cases import DTYPES, FP8, compact_case
from tests.plugins_cuda.checks import assert_same_bits
from tests.plugins_cuda.formats import assert_equal_bytes, bounds_of, code_of, parts, poisoned, read
from tests.plugins_cuda.test_compact_turn import turn_case
from tests.plugins_cuda.test_turn import BlockCase, block_case
from tests.stored_tables import FORMATS

SIZES = (24, 64, 160)


def compute(library: KernelLibrary, operator: Operator, form: str, **given: Any) -> dict[str, Tensor]:
    """Run an operator; return its outputs and the state that it updated, on the CPU."""
    moved = {
        name: value.to(library.device_type, copy=True) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    made = library.compute(operator, {**moved, **code_of(form)})
    return {name: value.cpu() for name, value in {**moved, **made}.items() if isinstance(value, Tensor)}


def cleared(tables: dict[str, Tensor], used: Tensor) -> dict[str, Tensor]:
    """Return parts [B,G,n,.] with zeros where `used` [B,n] or [B,G,n] is false."""
    mask = (used[:, None] if used.dim() == 2 else used)[..., None]
    return {name: torch.where(mask, part, torch.zeros((), dtype=part.dtype)) for name, part in tables.items()}


def check_kept(found: dict[str, Tensor], form: str, case: Any, *, dtype: torch.dtype) -> None:
    """Caches hold the parts of the kept tokens, zeros behind them; bounds are those of what is read back."""
    kept = found["indices"] >= 0
    where = found["indices"].clamp(min=0).long()[..., None].expand(-1, -1, -1, case.k.shape[3])
    keys, values = (torch.where(kept[..., None], t.gather(2, where), 0) for t in (case.k, case.v))
    for name, expected in cleared(parts(keys, values, form), kept).items():
        assert_equal_bytes(found[name], expected, name)
    lengths = found["cache_lengths"]
    bounds = bounds_of(read(keys, form, "keys"), lengths, case.page_size, dtype, fp8=case.fp8_bounds)
    assert_same_bits(found["bounds"], bounds, "bounds")


@FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_compaction_chooses_by_exact_keys_and_stores_codes(
    library: KernelLibrary, form: str, size: int, dtype: torch.dtype, fp8: bool
) -> None:
    """A row that evicts, one that fits, an empty one; the choice is that over exact keys, to the bit."""
    case = compact_case(lengths=[150, 20, 0], size=size, dtype=dtype, fp8=fp8, seed=size)
    found = compute(library, COMPACT, form, **case.arguments())
    exact = library.compact(**case.to(library.device_type).arguments())
    assert torch.equal(found["indices"], exact.indices.cpu())
    assert torch.equal(found["cache_lengths"], exact.cache_lengths.cpu())
    check_kept(found, form, case, dtype=dtype)


@pytest.mark.parametrize("form", FORMATS)
def test_compaction_of_strided_tables_gives_the_same_bits(library: KernelLibrary, form: str) -> None:
    case = compact_case(lengths=[90, 40], size=32, dtype=torch.bfloat16)
    turned = {name: getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("k", "v")}
    plain, arguments = compute(library, COMPACT, form, **case.arguments()), case.to(library.device_type).arguments()
    found = library.compute(
        COMPACT, {**arguments, **{name: t.to(library.device_type) for name, t in turned.items()}, **code_of(form)}
    )
    for name, value in found.items():
        assert_equal_bytes(value.cpu(), plain[name], name)


@FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_compaction_after_a_turn_votes_on_stored_keys_and_moves_codes(
    library: KernelLibrary, form: str, size: int, dtype: torch.dtype, fp8: bool
) -> None:
    """Votes read what is stored: the choice is that over float32 tables of it. Codes move."""
    case = turn_case([150, 24, 90], [8, 3, 1], size=size, dtype=dtype, fp8=fp8, seed=size)
    within = (torch.arange(case.k.shape[2]) < case.prompt_lengths[:, None])[:, None, :, None]
    case.k.copy_(torch.where(within, case.k, 0))
    case.v.copy_(torch.where(within, case.v, 0))
    joined = parts(case.k, case.v, form, (STORED_KEYS, STORED_VALUES))
    arguments = {name: value for name, value in case.turn_arguments().items() if name not in ("k", "v")}
    found = compute(library, COMPACT_TURN, form, **arguments, **joined)
    exact = {"k": read(case.k, form, "keys"), "v": read(case.v, form, "values"), "q_window": case.q_window.float()}
    moved = {name: t.to(library.device_type) if isinstance(t, Tensor) else t for name, t in (arguments | exact).items()}
    chosen = library.compute(COMPACT_TURN, moved)
    assert torch.equal(found["indices"], chosen["indices"].cpu())
    check_kept(found, form, case, dtype=dtype)


def tables(case: BlockCase, form: str) -> dict[str, Tensor]:
    """Return the caches before a turn, poisoned where no token is."""
    used = torch.arange(case.k_cache.shape[2]) < case.cache_lengths[:, None]
    keys, values = (torch.where(used[:, None, :, None], t, 0) for t in (case.k_cache, case.v_cache))
    return {name: poisoned(part, used) for name, part in parts(keys, values, form).items()}


def tokens(case: BlockCase) -> dict[str, Tensor]:
    return {name: getattr(case, name) for name in ("k_new", "v_new", "cache_lengths", "lengths")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_a_turn_is_stored_behind_the_others(library: KernelLibrary, form: str, size: int, dtype: torch.dtype) -> None:
    """Row 1 fills its cache, row 2 has more tokens than slots."""
    case = block_case([5, 30, 40], [30, 14, 9], capacity=44, size=size, dtype=dtype)
    before = tables(case, form)
    found = compute(library, APPEND_BLOCK, form, **tokens(case), **before)
    for name, part in parts(case.k_new.nan_to_num(), case.v_new.nan_to_num(), form).items():
        expected = before[name].clone()
        for row, (stored, new) in enumerate(zip(case.cache_lengths.tolist(), case.lengths.tolist(), strict=True)):
            end = min(stored + new, 44)
            expected[row, :, stored:end] = part[row, :, : end - stored]
        assert_equal_bytes(found[name], expected, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_stored_and_new_tokens_are_joined(library: KernelLibrary, form: str, size: int, dtype: torch.dtype) -> None:
    case = block_case([5, 0, 40], [33, 14, 9], capacity=44, size=size, dtype=dtype)
    found = compute(library, JOIN_BLOCK, form, **tokens(case), **tables(case, form))
    batch, heads, block, _ = case.k_new.shape
    exact = [torch.zeros(batch, heads, 44 + block, size, dtype=dtype) for _ in range(2)]
    for table, cache, new in zip(exact, (case.k_cache, case.v_cache), (case.k_new, case.v_new), strict=True):
        for row, (m, n) in enumerate(zip(case.cache_lengths.tolist(), case.lengths.tolist(), strict=True)):
            table[row, :, : m + n] = torch.cat([cache[row, :, :m], new[row, :, :n]], dim=1)
    lengths = case.cache_lengths + case.lengths
    used = torch.arange(44 + block) < lengths[:, None]
    for name, expected in cleared(parts(*exact, form, (JOINED_KEYS, JOINED_VALUES)), used).items():
        assert_equal_bytes(found[name], expected, name)
    assert torch.equal(found["joined_lengths"], lengths)


@FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_a_turn_raises_bounds(library: KernelLibrary, form: str, size: int, dtype: torch.dtype, fp8: bool) -> None:
    case = block_case([5, 0, 30], [30, 14, 9], capacity=44, size=size, dtype=dtype)
    keys = torch.zeros_like(case.k_cache)
    for row, (m, n) in enumerate(zip(case.cache_lengths.tolist(), case.lengths.tolist(), strict=True)):
        keys[row, :, : m + n] = torch.cat([case.k_cache[row, :, :m], case.k_new[row, :, :n]], dim=1)
    stored, lengths = read(keys, form, "keys"), case.cache_lengths
    before, after = (bounds_of(stored, m, 4, dtype, fp8=fp8) for m in (lengths, lengths + case.lengths))
    given = {name: value for name, value in tokens(case).items() if name != "v_new"}
    found = compute(library, RAISE_BOUNDS, form, **given, bounds=before, page_size=4, fp8_bounds=int(fp8))
    assert_same_bits(found["bounds"], after, "bounds")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_a_cache_is_overwritten(library: KernelLibrary, form: str, size: int) -> None:
    case = block_case([7, 0, 9], [1, 1, 1], capacity=11, size=size)
    kept = parts(torch.randn(3, 2, 11, size), torch.randn(3, 2, 11, size), form, (K_KEPT, V_KEPT))
    positions = {
        name: torch.randint(100, (3, 2, 11), dtype=torch.int32) for name in ("slot_positions", "positions_kept")
    }
    found = compute(library, REPLACE_CACHE, form, **tables(case, form), **kept, **positions)
    for name, part in kept.items():
        state = name.replace("_kept_", "_").replace("_kept", "_cache")
        assert_equal_bytes(found[state], part, state)
    assert torch.equal(found["slot_positions"], positions["positions_kept"])
