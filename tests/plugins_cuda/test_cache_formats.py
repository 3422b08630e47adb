"""Decode steps over caches in a format: stored bits are the reference's, and attention reads what is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvc_trt import reference
from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import SCHEDULES, KernelLibrary
from kvc_trt.kernels.rotated import ROTATED_DENSE_ATTENTION
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.verify.rankings.index_lists import IndexComparison
from tests.near_ties import compare_selection
from tests.plugins_cuda.cases import DTYPES, FP8, StepCase, step_case
from tests.plugins_cuda.checks import assert_close, assert_same_bits, attend_exactly, truncates
from tests.plugins_cuda.formats import StoredStep, assert_equal_bytes, bounds_of, code_of, read
from tests.plugins_cuda.redzones import Guarded
from tests.stored_tables import FORMATS

EXTREMES = (
    0.0,
    -0.0,
    1e-45,
    -1e-38,
    6e-8,
    5.9e-8,
    448.0,
    449.0,
    65504.0,
    65520.0,
    -1e30,
    torch.finfo(torch.float32).max,
    math.pi,
)


def dense_case(lengths: Sequence[int], *, group: int = 4, kv_heads: int = 2, **options: object) -> StepCase:
    return step_case(lengths=lengths, heads=group * kv_heads, kv_heads=kv_heads, **options)  # type: ignore[arg-type]


def check_dense(library: KernelLibrary, step: StoredStep) -> dict[str, Tensor]:
    """Compare the caches' bits after the step, and its output with exact attention to what is read back."""
    found, (keys, values) = step.run(library), step.read()
    for name, expected in step.expected().items():
        assert_equal_bytes(found[name], expected, name)
    for row, before in enumerate(step.case.cache_lengths.tolist()):
        if not 0 <= before < keys.shape[2]:
            assert not found["output"][row].any(), "an inactive row has output"
            continue
        everything = torch.arange(before + 1).expand(keys.shape[1], -1)
        exact = attend_exactly(step.case.query[row], keys[row], values[row], everything)
        assert_close(found["output"][row], exact, f"row {row}")
    return found


def check_hybrid(library: KernelLibrary, step: StoredStep) -> None:
    """The caches and bounds to the bit, the reference's tokens or proven near-ties of them, exact attention to them."""
    case, (keys, values) = step.case, step.read()
    fp8, page, dtype = case.fp8_bounds, case.page_size, case.query.dtype
    active = (case.cache_lengths >= 0) & (case.cache_lengths < keys.shape[2])
    before, after = (torch.where(active, case.cache_lengths + more, 0) for more in (0, 1))
    numbers = {name: getattr(case, name) for name in ("page_size", "top_r", "top_k", "token_budget", "dense_until")}
    stored = bounds_of(keys, before, page, dtype, fp8=fp8)
    found = step.run(library, HYBRID_ATTENTION, bounds=stored, fp8_bounds=fp8, recent=case.recent, **numbers)
    for name, expected in step.expected().items():
        assert_equal_bytes(found[name], expected, name)
    raised = bounds_of(keys, after, page, dtype, fp8=fp8)
    assert_same_bits(found["bounds"], raised, "bounds")
    low, high = reference_ops.page_major(raised[active], -(-keys.shape[2] // page))
    _, chosen = reference.hybrid_attention(
        case.query[active].float(), keys[active], values[active], after[active], low.float(), high.float(),
        force_recent=case.recent, **numbers,
    )  # fmt: skip
    assert bool((found["selected"][~active] == -1).all()), "an inactive row reads"
    total = IndexComparison()
    for at, row in enumerate(active.nonzero()[:, 0].tolist()):
        m, selected = int(after[row]), found["selected"][row : row + 1]
        total = total + compare_selection(
            case.query[row : row + 1].float().numpy(), keys[row : row + 1, :, :m].numpy(),
            after[row : row + 1].numpy(), chosen[at : at + 1].numpy(), selected.numpy(), page_size=page,
            top_r=case.top_r, fp8_bounds=bool(fp8), recent=case.recent, truncates=truncates(library, dtype),
        )  # fmt: skip
        exact = attend_exactly(case.query[row], keys[row], values[row], selected[0])
        assert_close(found["output"][row], exact, f"output of row {row}")
    assert not total.wrong, total.wrong


@FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 64, 160])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_sparse_steps_equal_the_reference(
    library: KernelLibrary, form: str, size: int, dtype: torch.dtype, fp8: bool
) -> None:
    """Sparse rows, one that reads everything, and one without a slot."""
    case = step_case(lengths=[200, 130, 9, -1], size=size, dtype=dtype, fp8=fp8, seed=size, recent=size % 7)
    check_hybrid(library, StoredStep(case, form))


@FP8
@pytest.mark.parametrize("form", FORMATS)
def test_a_key_that_is_not_finite_spoils_its_page_alone(library: KernelLibrary, form: str, fp8: bool) -> None:
    """Bounds of a lost key are NaN in all channels, or the largest in fp8."""
    case = step_case(lengths=[60, 70], size=32, fp8=fp8)
    case.k_new[0, 1, 3] = math.nan
    keys, _ = StoredStep(case, form).read()
    before, after = case.cache_lengths, case.cache_lengths + 1
    numbers = {name: getattr(case, name) for name in ("page_size", "top_r", "top_k", "token_budget", "dense_until")}
    stored = bounds_of(keys, before, case.page_size, torch.float32, fp8=fp8)
    found = StoredStep(case, form).run(
        library, HYBRID_ATTENTION, bounds=stored, fp8_bounds=int(fp8), recent=0, **numbers
    )
    assert_same_bits(found["bounds"], bounds_of(keys, after, case.page_size, torch.float32, fp8=fp8), "bounds")


@pytest.mark.parametrize("form", FORMATS)
def test_a_step_that_rotates_stores_the_rotated_token(library: KernelLibrary, form: str) -> None:
    """The rotated key is stored: the same state and output as those of the plain step after the rotation."""
    case = step_case(lengths=[200, 9], size=64, dtype=torch.bfloat16)
    plain = StoredStep(case, form).run(library)
    joined = torch.cat([case.query, case.k_new, case.v_new], dim=1)
    angles = {name: torch.full((2, 32), value) for name, value in (("cosines", 1.0), ("sines", 0.0))}
    given = {"joined": joined, **angles, **StoredStep(case, form).state(), "cache_lengths": case.cache_lengths}
    moved = {name: value.to(library.device_type, copy=True) for name, value in given.items()}
    made = library.compute(ROTATED_DENSE_ATTENTION, {**moved, "heads": 4, **code_of(form)})
    assert torch.equal(made["output"].cpu(), plain["output"])
    for name in StoredStep(case, form).state():
        assert_equal_bytes(moved[name].cpu(), plain[name], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 24, 64, 72, 96, 128, 136, 160, 256])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_every_head_size_equals_the_reference(library: KernelLibrary, form: str, size: int, dtype: torch.dtype) -> None:
    check_dense(library, StoredStep(dense_case([40, 300, -1], group=3, size=size, dtype=dtype, seed=size), form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 7, 8, 16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_every_group_size_equals_the_reference(
    library: KernelLibrary, form: str, group: int, dtype: torch.dtype
) -> None:
    check_dense(library, StoredStep(dense_case([17, 290], group=group, size=64, dtype=dtype, seed=group), form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_several_tiles_equal_the_reference(library: KernelLibrary, form: str, dtype: torch.dtype) -> None:
    """Numbers are read one tile ahead, and sums of minima are rescaled: a warp takes two tiles of 250 tokens."""
    check_dense(library, StoredStep(dense_case([250, 131], group=5, kv_heads=1, size=96, dtype=dtype), form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_rows_of_many_splits_equal_the_reference(library: KernelLibrary, form: str, dtype: torch.dtype) -> None:
    """Each of 33 splits has four tiles for a warp."""
    check_dense(library, StoredStep(dense_case([16500], group=1, kv_heads=1, size=64, dtype=dtype), form))


@pytest.mark.parametrize("power", [-120, -110, -100, -20, 20, 100])
def test_queries_of_any_magnitude_count(library: KernelLibrary, power: int) -> None:
    """Heads of a group whose queries differ by powers of two, and zeros; the keys make up for `power`."""
    check_scaled_query(library, power)


def check_scaled_query(library: KernelLibrary, power: int) -> None:
    """Compare a step in fp8 whose queries are scaled by 2^power, and its keys by the inverse."""
    case = dense_case([60, 300], group=4, kv_heads=1, size=64, dtype=torch.bfloat16, seed=3)
    case.query.mul_(2.0**power)
    case.query[:, 1].mul_(2.0**-4)
    case.query[:, 2].mul_(2.0**6)
    case.query[:, 3] = 0.0
    for keys in (case.k_cache, case.k_new):
        keys.mul_(2.0**-power)
    check_dense(library, StoredStep(case, "fp8"))


@pytest.mark.parametrize("channel", [0, 1])
@pytest.mark.parametrize("form", ["int8", "fp8", "k8v4"])
def test_small_numbers_of_a_query_count_beside_a_large_one(library: KernelLibrary, form: str, channel: int) -> None:
    """Keys are 0 in the channel of a number 2^28 times the others, so that the others decide."""
    check_large_number(library, form, channel)


def check_large_number(library: KernelLibrary, form: str, channel: int) -> None:
    """Compare a step whose queries are large in one channel, where keys are 0."""
    case = dense_case([60, 9], group=3, kv_heads=1, size=64, dtype=torch.bfloat16, seed=4)
    case.query[:, :, channel] = 2.0**28
    for keys in (case.k_cache, case.k_new):
        keys[..., channel] = 0.0
    check_dense(library, StoredStep(case, form))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", FORMATS)
def test_a_query_that_is_not_finite_spoils_its_head_alone(library: KernelLibrary, form: str, value: float) -> None:
    case = dense_case([40, 300], group=4, kv_heads=1, size=64, dtype=torch.bfloat16)
    clean = StoredStep(case, form).run(library)["output"]
    case.query[0, 2, 7] = value
    found = StoredStep(case, form).run(library)["output"]
    lost = torch.zeros(2, 4, dtype=torch.bool)
    lost[0, 2] = True
    assert torch.equal(found.isnan(), lost[..., None].expand_as(found))
    assert torch.equal(found[~lost], clean[~lost])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_token_is_stored_as_the_reference_stores_it(library: KernelLibrary, data: st.DataObject) -> None:
    """Numbers of any magnitude, those at which roundings change among them."""
    size, form = 8 * data.draw(st.integers(2, 32)), data.draw(st.sampled_from(FORMATS))
    case = dense_case([0, 3], group=1, kv_heads=1, size=size, seed=data.draw(st.integers(0, 1000)))
    numbers = st.one_of(st.sampled_from(EXTREMES), st.floats(width=32, allow_nan=False, allow_infinity=False))
    power = 2.0 ** data.draw(st.integers(-140, 120))
    for new in (case.k_new, case.v_new):
        new.mul_(power)
        for channel in data.draw(st.lists(st.integers(0, size - 1), max_size=4)):
            new[0, 0, channel] = data.draw(numbers)
    found = StoredStep(case, form).run(library)
    for name, expected in StoredStep(case, form).expected().items():
        assert_equal_bytes(found[name], expected, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_zero_vectors_are_stored_with_a_scale_of_one(library: KernelLibrary, form: str, dtype: torch.dtype) -> None:
    """Zeros of both signs, and a group of them beside others: the scale is 1, or the exponent 127."""
    case = dense_case([4, 5, 6], group=1, size=64, dtype=dtype)
    case.k_new[0], case.v_new[0] = 0.0, -0.0
    case.k_new[1, :, :32], case.v_new[1, :, 32:] = -0.0, 0.0
    case.k_new[2, :, ::2], case.v_new[2] = 0.0, case.v_new[2].abs()
    check_dense(library, StoredStep(case, form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_a_token_that_is_not_finite_spoils_its_heads_alone(
    library: KernelLibrary, form: str, value: float, dtype: torch.dtype
) -> None:
    """Its vector is NaN in all channels; what does not read it does not change."""
    case = dense_case([40, 40], group=2, size=64, dtype=dtype)
    clean = StoredStep(case, form).run(library)["output"]
    case.k_new[0, 1, 5] = value
    case.v_new[1, 0, 9] = value
    step = StoredStep(case, form)
    found = step.run(library)
    for name, expected in step.expected().items():
        assert_equal_bytes(found[name], expected, name)
    lost = torch.zeros(2, 4, dtype=torch.bool)
    lost[0, 2:], lost[1, :2] = True, True
    assert torch.equal(found["output"].isnan(), lost[..., None].expand_as(found["output"]))
    assert torch.equal(found["output"][~lost], clean[~lost])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
def test_weights_count_with_more_than_their_type(library: KernelLibrary, form: str, dtype: torch.dtype) -> None:
    """Outputs are within 3e-5 before their own rounding, also where values are small."""
    case = dense_case([300], group=8, kv_heads=1, size=64, dtype=dtype, seed=3)
    case.v_cache.mul_(2.0**-10)
    step = StoredStep(case, form)
    keys, values = step.read()
    exact = attend_exactly(case.query[0], keys[0], values[0], torch.arange(301).expand(1, -1))
    found = step.run(library)["output"][0].double()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    rounding = (exact.abs() * torch.finfo(dtype).eps).clamp(min=smallest) / 2
    assert float(((found - exact).abs() - rounding).max()) <= 3e-5 * float(exact.abs().max())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_any_schedule(
    emulation: KernelLibrary, form: str, dtype: torch.dtype
) -> None:
    case = dense_case([600, 3, 257], group=5, size=96, dtype=dtype)
    together = StoredStep(case, form).run(emulation)["output"]
    names = ("query", "k_new", "v_new", "k_cache", "v_cache", "bounds", "cache_lengths")
    first = replace(case, **{name: getattr(case, name)[:1] for name in names})
    for order in SCHEDULES:
        emulation.set_schedule(order, seed=1)
        assert torch.equal(StoredStep(first, form).run(emulation)["output"][0], together[0])
    emulation.set_schedule("forward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_a_step_writes_nothing_outside_its_buffers(library: KernelLibrary, form: str, dtype: torch.dtype) -> None:
    """Nothing is written outside of a buffer, however few bytes a vector takes."""
    case, memory = dense_case([3, 300, -1], group=3, size=24, dtype=dtype), Guarded(library.device_type)
    step = StoredStep(case, form)
    token = {name: getattr(case, name) for name in ("query", "k_new", "v_new", "cache_lengths")}
    tensors = {name: memory.copy(name, value) for name, value in {**token, **step.state()}.items()}
    library.compute(DENSE_ATTENTION, {**tensors, **code_of(form)})
    memory.check()
    for name, expected in step.expected().items():
        assert_equal_bytes(tensors[name].cpu(), expected, name)


def test_a_format_changes_what_is_read() -> None:
    """The bars of these tests tell formats apart from each other and from exact tables."""
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    tables = [values, *(read(values, form, "keys") for form in ("int8", "fp8", "int4"))]
    for i, one in enumerate(tables):
        assert all(float((one - other).abs().max()) > 1e-3 for other in tables[:i])
