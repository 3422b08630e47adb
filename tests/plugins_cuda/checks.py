"""Checks of a case's results: the reference's choices or proven near-ties, and all else exact or within the bars."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import CompactResult, KernelLibrary
from kvc_trt.verify.rankings.index_lists import IndexComparison
from tests.near_ties import compare_compaction, compare_selection
from tests.plugins_cuda.cases import CompactCase, StepCase, bounds_of

VALUE_BARS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-3}
"""Largest difference of an output, relative to the largest magnitude of its row, before its own rounding (for bfloat16
that alone is 2^-8)."""


def truncates(library: KernelLibrary, dtype: torch.dtype) -> bool:
    """Tell whether tensor cores sum products of this type, and cut (`methods.rankings.rounding.truncated_share`)."""
    return library.executor == "cuda" and dtype != torch.float32


def run_compact(library: KernelLibrary, case: CompactCase) -> CompactResult:
    """Return the library's answer, on the CPU; results are written over NaN and -7."""
    moved = case.to(library.device_type)
    expected = reference_ops.compute("compact", case.arguments())
    poison = (torch.full_like(t, math.nan if t.is_floating_point() else -7) for t in expected)
    out = CompactResult(*(t.to(library.device_type) for t in poison))
    return CompactResult(*(t.cpu() for t in library.compact(**moved.arguments(), out=out)))


def check_compact(library: KernelLibrary, case: CompactCase) -> IndexComparison:
    """Compare one call with the reference: all that follows from a choice is exact."""
    found, expected = run_compact(library, case), reference_ops.compute("compact", case.arguments())
    lengths = case.prompt_lengths.clamp(0, case.k.shape[2])
    keys = torch.where(_before(lengths, case.k.shape[2])[:, None, :, None], case.k.float(), 0.0)
    compared = compare_compaction(
        case.q_window.float().numpy(), keys.numpy(), lengths.numpy(), expected.indices.numpy(), found.indices.numpy(),
        pool_kernel=case.pool_kernel, truncates=truncates(library, case.k.dtype),
    )  # fmt: skip
    assert not compared.wrong, compared.wrong
    assert torch.equal(found.cache_lengths, expected.cache_lengths)
    kept = found.indices >= 0
    assert torch.equal(kept.sum(-1), expected.cache_lengths[:, None].expand(kept.shape[:2])), "wrong number kept"
    assert bool((found.indices.diff(dim=-1) > 0).logical_or(~kept[..., 1:]).all()), "indices do not ascend"
    where = found.indices.clamp(min=0).long()[..., None].expand(-1, -1, -1, case.k.shape[3])
    for name, source in (("k", case.k), ("v", case.v)):
        gathered = torch.where(kept[..., None], source.gather(2, where), torch.zeros((), dtype=source.dtype))
        assert_same_bits(getattr(found, f"{name}_cache"), gathered, f"{name}_cache")
    bounds = bounds_of(found.k_cache, found.cache_lengths, case.page_size, fp8=case.fp8_bounds)
    assert_same_bits(found.bounds, bounds, "bounds")
    return compared


def check_hybrid(library: KernelLibrary, case: StepCase) -> IndexComparison:
    """Compare one step with the reference, as `check_compact` does; the caches are compared bit by bit."""
    mine, moved = case.to("cpu"), case.to(library.device_type)
    _, expected = reference_ops.compute("hybrid_attention", mine.arguments())
    output, selected = library.hybrid_attention(**moved.arguments())
    assert selected is not None
    output, selected = output.cpu(), selected.cpu()
    for name in ("k_cache", "v_cache", "bounds"):
        assert_same_bits(getattr(moved, name).cpu(), getattr(mine, name), name)
    active = (case.cache_lengths >= 0) & (case.cache_lengths < case.k_cache.shape[2])
    assert not output[~active].any(), "an inactive row has output"
    assert bool((selected[~active] == -1).all()), "an inactive row reads"
    rows = active.nonzero()[:, 0].tolist()
    total = IndexComparison()
    for b in rows:
        m = int(case.cache_lengths[b]) + 1
        kept = selected[b] >= 0
        assert bool((selected[b] >= -1).logical_and(selected[b] < m).all()), "selected has slots that the row does not"
        assert bool((selected[b].diff(dim=-1) > 0).logical_or(~kept[:, 1:]).all()), "selected does not ascend"
        one = compare_selection(
            case.query[b : b + 1].float().numpy(), mine.k_cache[b : b + 1, :, :m].float().numpy(),
            case.cache_lengths[b : b + 1].numpy() + 1, expected[b : b + 1].numpy(), selected[b : b + 1].numpy(),
            page_size=case.page_size, top_r=case.top_r, fp8_bounds=bool(case.fp8_bounds), recent=case.recent,
            truncates=truncates(library, case.query.dtype),
        )  # fmt: skip
        total = total + one
        exact = attend_exactly(case.query[b], mine.k_cache[b], mine.v_cache[b], selected[b])
        assert_close(output[b], exact, f"output of row {b}")
    assert not total.wrong, total.wrong
    return total


def check_dense(library: KernelLibrary, case: StepCase) -> None:
    """Compare one dense step with exact attention over everything stored."""
    mine, moved = case.to("cpu"), case.to(library.device_type)
    reference_ops.dense_attention(**mine.dense_arguments())
    output = library.dense_attention(**moved.dense_arguments()).cpu()
    for name in ("k_cache", "v_cache"):
        assert_same_bits(getattr(moved, name).cpu(), getattr(mine, name), name)
    for b, before in enumerate(case.cache_lengths.tolist()):
        if not 0 <= before < case.k_cache.shape[2]:
            assert not output[b].any(), "an inactive row has output"
            continue
        everything = torch.arange(before + 1).expand(case.k_cache.shape[1], -1)
        assert_close(output[b], attend_exactly(case.query[b], mine.k_cache[b], mine.v_cache[b], everything), f"row {b}")


def attend_exactly(query: Tensor, keys: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
    """float64 attention of one row over `chosen` [G,k] (-1: none): query [H,D], keys and values [G,C,D] -> [H,D]."""
    grouped = query.double().reshape(len(chosen), -1, query.shape[-1])
    heads = []
    for kv, slots in enumerate(chosen):
        slots = slots[slots >= 0].long()
        logits = grouped[kv] @ keys[kv, slots].double().T / math.sqrt(query.shape[-1])
        heads.append(torch.softmax(logits, dim=-1) @ values[kv, slots].double())
    return torch.cat(heads)


def assert_close(found: Tensor, exact: Tensor, name: str) -> None:
    """Within the bar of the type of `found`, relative to the largest magnitude of `exact`."""
    scale = exact.abs().max().clamp(min=1e-30)
    rounding = (exact.abs() * torch.finfo(found.dtype).eps / 2) if found.dtype != torch.float32 else 0.0
    error = (((found.double() - exact).abs() - rounding).max() / scale).item()
    assert error <= VALUE_BARS[found.dtype], f"{name}: error {error:.3g} of the largest magnitude {scale.item():.3g}"


def assert_same_bits(found: Tensor, expected: Tensor, name: str) -> None:
    """Equal as bits, but that any NaN equals any other and -0 equals 0 (a maximum may return either)."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    assert found.shape == expected.shape, f"{name}: {list(found.shape)}, expected {list(expected.shape)}"
    assert bool(same.all()), f"{name}: {int((~same).sum())} elements differ, first at {(~same).nonzero()[0].tolist()}"


def _before(lengths: Tensor, size: int) -> Tensor:
    return torch.arange(size) < lengths[:, None]
