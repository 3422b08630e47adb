"""`torch.ops.kvc` over caches in a format, by the reference and by the emulation: the same bits, from the same oracles.

The checks are those of the kernels (`tests/plugins_cuda`), which take a library; here it is `torch.ops.kvc`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvc_trt.kernels import use_library
from kvc_trt.kernels.library import CompactResult, KernelLibrary
from kvc_trt.kernels.ops import call, kvc, operation
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS, ROTATED_DENSE_ATTENTION
from kvc_trt.kernels.stored_parts import StoredTables, parts_of, read_parts
from kvc_trt.models.cache_formats import CACHE_FORMATS, VECTOR_FORMATS, format_of_code
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.schema import Operator
from tests.plugins_cuda import test_cache_formats as steps
from tests.plugins_cuda import test_cache_formats_turns as turns
from tests.plugins_cuda.cases import DTYPES, FP8, compact_case, step_case
from tests.plugins_cuda.formats import StoredStep, assert_equal_bytes
from tests.stored_tables import FORMATS, read_back, stored

ONE_MORE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class ThroughTorch:
    """`torch.ops.kvc` with the interface of a library."""

    device_type, executor = "cpu", "emulation"

    def compute(self, operator: Operator, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        given = dict(arguments)
        form = format_of_code(given.pop("cache_format", 0))
        made = operation(operator, form)(**given)
        fresh = (one.name for one in operator.in_format(form).outputs if one.alias is None)
        values = made if isinstance(made, tuple | list) else () if made is None else (made,)
        return dict(zip(fresh, values, strict=True))

    def compact(self, **arguments: Any) -> CompactResult:
        return CompactResult(**self.compute(COMPACT, arguments))


@pytest.fixture(params=["reference", "emulation"])
def ops(request: pytest.FixtureRequest, emulation: KernelLibrary) -> Iterator[ThroughTorch]:
    """`torch.ops.kvc`, computed by the reference and by the emulated kernels."""
    with use_library(emulation.path) if request.param == "emulation" else nullcontext():
        yield ThroughTorch()


@FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_steps_store_a_token_and_read_what_is_stored(ops, form, size, dtype, fp8):
    case = step_case(lengths=[90, 9, -1], size=size, dtype=dtype, fp8=fp8, seed=size)
    steps.check_hybrid(ops, StoredStep(case, form))
    steps.check_dense(ops, StoredStep(case, form))


@pytest.mark.parametrize("form", FORMATS)
def test_a_step_that_rotates_stores_the_rotated_token(ops, form):
    steps.test_a_step_that_rotates_stores_the_rotated_token(ops, form)


@FP8
@pytest.mark.parametrize("form", FORMATS)
def test_a_key_that_is_not_finite_spoils_its_page_alone(ops, form, fp8):
    steps.test_a_key_that_is_not_finite_spoils_its_page_alone(ops, form, fp8)


@FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_compactions_store_survivors_once(ops, form, size, dtype, fp8):
    """Covers a prompt after exact votes, and a turn, after which codes move and votes read them."""
    turns.test_compaction_chooses_by_exact_keys_and_stores_codes(ops, form, size, dtype, fp8)
    turns.test_compaction_after_a_turn_votes_on_stored_keys_and_moves_codes(ops, form, size, dtype, fp8)


@FP8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.pairwise
def test_turns_store_join_and_move_tokens(ops, form, dtype, fp8):
    turns.test_a_turn_is_stored_behind_the_others(ops, form, 64, dtype)
    turns.test_stored_and_new_tokens_are_joined(ops, form, 64, dtype)
    turns.test_a_turn_raises_bounds(ops, form, 64, dtype, fp8)
    turns.test_a_cache_is_overwritten(ops, form, 64)


def arguments(operator: Operator, form: str) -> dict[str, Any]:
    """The arguments of an operator over caches in a format, without NaN: opcheck compares, and NaN equals nothing."""
    case = step_case(lengths=[60, -1, 10], fp8=True)
    case.k_cache.nan_to_num_(), case.v_cache.nan_to_num_()
    given = {**case.arguments(), **{name: part.clone() for name, part in StoredStep(case, form).state().items()}}
    if operator is COMPACT:
        prompt = compact_case(lengths=[60, 24, 3], fp8=True)
        given = {**prompt.arguments(), "k": prompt.k.nan_to_num(), "v": prompt.v.nan_to_num()}
    if operator is ROTATED_DENSE_ATTENTION:
        angles = torch.rand(3, case.query.shape[2] // 2)
        given |= {"joined": torch.cat([case.query, case.k_new, case.v_new], dim=1), "heads": case.query.shape[1]}
        given |= {"cosines": angles.cos(), "sines": angles.sin()}
    own = operator.in_format(CACHE_FORMATS[form])
    names = {one.name for one in (*own.inputs, *own.attributes)} - {"cache_format", "dense_until"} | (
        {"dense_until"} if operator is HYBRID_ATTENTION else set()
    )
    return {name: value for name, value in given.items() if name in names}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "operator", [COMPACT, HYBRID_ATTENTION, DENSE_ATTENTION, ROTATED_DENSE_ATTENTION], ids=lambda one: one.name
)
@pytest.mark.pairwise
def test_an_operator_keeps_pytorchs_rules(operator, form):
    """The schema lists the written parts, the fake results have the real shape and type, and tracing works."""
    given = arguments(operator, form)
    done = torch.library.opcheck(operation(operator, CACHE_FORMATS[form]), (), given)
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("form", FORMATS)
def test_a_step_can_leave_out_what_it_selected(ops, form):
    whole, alone = arguments(HYBRID_ATTENTION, form), arguments(HYBRID_ATTENTION, form)
    output, _ = operation(HYBRID_ATTENTION, CACHE_FORMATS[form])(**whole)
    assert torch.equal(operation(HYBRID_ATTENTION, CACHE_FORMATS[form], ("selected",))(**alone), output)
    for name, value in whole.items():
        if isinstance(value, Tensor):
            assert_equal_bytes(value, alone[name], name)


def test_every_operator_has_the_formats_that_it_depends_on():
    for operator in LIBRARY_OPERATORS:
        for form in CACHE_FORMATS.values():
            own = operator.in_format(form)
            assert operator.in_format(form) is own is own.in_format(form), "an operator that is made at every call"
            assert operation(operator, form) is not None
    assert str(kvc.dense_attention_k8v4.default._schema) == (
        "kvc::dense_attention_k8v4(Tensor query, Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) k_scale, "
        "Tensor(c!) v_cache, Tensor(d!) v_scale, Tensor(e!) v_minimum, Tensor cache_lengths) -> Tensor"
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_returns_state_under_its_new_names(form):
    own, given = DENSE_ATTENTION.in_format(CACHE_FORMATS[form]), arguments(DENSE_ATTENTION, form)
    found = dict(zip((one.name for one in own.outputs), call(own, {}, **given), strict=True))
    assert found.pop("output").shape == given["query"].shape
    assert all(value is given[name.removesuffix("_out")] for name, value in found.items())


VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, 6e-8, 448.0, 449.0, 65504.0, 65520.0, float("nan"), float("inf")]),
    st.floats(width=32),
)


@ONE_MORE
@given(
    form=st.sampled_from(sorted(VECTOR_FORMATS)), size=st.sampled_from([2, 8, 24, 32, 64, 72]),
    power=st.integers(-140, 90), seed=st.integers(0, 10_000), some=st.lists(VALUES, max_size=5),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_stored_parts_have_the_bits_of_the_reference(form, size, power, seed, some, dtype):
    """Bit for bit, and so is what is read of them; a vector that is not finite is NaN in all channels."""
    vector = VECTOR_FORMATS[form]
    exact = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    exact[0, 0, : len(some)] = torch.tensor(some[:size])
    exact = exact.to(dtype)
    parts = parts_of(exact, vector)
    for number, (found, expected) in enumerate(zip(parts, stored(exact.float().numpy(), vector), strict=True)):
        assert_equal_bytes(found, torch.from_numpy(expected), f"part {number}")
    np.testing.assert_array_equal(read_parts(parts, vector).numpy(), read_back(exact.float().numpy(), vector))
    moved = StoredTables.of(exact, exact, CACHE_FORMATS["auto"])
    assert moved.parts[0] is moved.read()[0] is exact
