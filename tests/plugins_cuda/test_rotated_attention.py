"""A step that rotates its token itself has the bits of rotating it first and then taking the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.c_library import ARCHITECTURES, KernelError
from kvc_trt.kernels.library import KernelLibrary, empty_outputs
from kvc_trt.kernels.rotated import ROTATED_DENSE_ATTENTION, ROTATED_HYBRID_ATTENTION
from kvc_trt.operators.schema import Operator
from tests.plugins_cuda.cases import DTYPES, FP8, StepCase, step_case
from tests.plugins_cuda.hybrid_steps import state_of, steps
from tests.plugins_cuda.test_score_and_select import MANY_ROWS
from tests.rounding import assert_close


@dataclass(frozen=True)
class Unrotated:
    """A step whose token has not been rotated yet."""

    step: StepCase
    """The inputs of the same step after rotation."""
    joined: Tensor
    cosines: Tensor
    sines: Tensor

    def arguments(self, operator: Operator, device: str) -> dict[str, Any]:
        """Return the arguments of one call, on copies of the caches."""
        given = self.step.to(device).arguments() | {
            name: getattr(self, name).to(device, copy=True) for name in ("joined", "cosines", "sines")
        }
        names = {tensor.name for tensor in operator.inputs} | {attribute.name for attribute in operator.attributes}
        return {name: value for name, value in given.items() if name in names} | {"heads": self.step.query.shape[1]}


def unrotated(step: StepCase, seed: int = 0) -> Unrotated:
    """Return a step of the same sizes and caches; the values of `step` are those of the token before it is rotated."""
    make = torch.Generator().manual_seed(seed)
    batch, heads, size = step.query.shape
    joined = torch.cat([step.query, step.k_new, step.v_new], dim=1)
    angles = torch.rand((batch, size // 2), generator=make) * 1000
    cosines, sines = angles.cos(), angles.sin()
    query, key, value = reference_ops.rotated_token(joined, cosines, sines, heads)
    return Unrotated(replace(step, query=query, k_new=key, v_new=value.contiguous()), joined, cosines, sines)


def check(library: KernelLibrary, case: Unrotated) -> None:
    """Compare both operations with the step of the token that was rotated before."""
    check_hybrid(library, case)
    check_dense(library, case)


def check_hybrid(library: KernelLibrary, case: Unrotated) -> None:
    """Compare the one that selects."""
    plain = case.step.to(library.device_type)
    output, selected = library.hybrid_attention(**plain.arguments())
    assert selected is not None
    _compare(library, case, ROTATED_HYBRID_ATTENTION, {"output": output, "selected": selected}, plain)


def check_dense(library: KernelLibrary, case: Unrotated) -> None:
    """Compare the one that reads everything."""
    plain = case.step.to(library.device_type)
    output = library.dense_attention(**plain.dense_arguments())
    _compare(library, case, ROTATED_DENSE_ATTENTION, {"output": output}, plain)


def _compare(
    library: KernelLibrary, case: Unrotated, operator: Operator, made: Mapping[str, Tensor], plain: StepCase
) -> None:
    """Compare with the plain step's results and caches; results are written over NaN and -7."""
    given = case.arguments(operator, library.device_type)
    out = empty_outputs(operator, given)
    for tensor in out.values():
        tensor.fill_(math.nan if tensor.is_floating_point() else -7)
    library.compute(operator, given, out=out)
    expected = {**made, "query": plain.query}
    assert out.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(out[name], tensor), f"{operator.name}: {name}"
    for name, tensor in state_of(plain).items():
        assert name not in given or same_bits(given[name], tensor), f"{operator.name}: {name}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture(params=ARCHITECTURES[:2])
def either(request: pytest.FixtureRequest, emulation: KernelLibrary) -> Iterator[KernelLibrary]:
    """The emulation of a GPU without clusters, and of one with them."""
    emulation.set_device(request.param)
    yield emulation
    emulation.set_device(ARCHITECTURES[0])


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_steps_equal_rotation_before_attention(
    either: KernelLibrary, dtype: torch.dtype, data: st.DataObject
) -> None:
    check(either, unrotated(data.draw(steps(dtype)), data.draw(st.integers(0, 1000))))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 24, 40, 64, 128, 136, 256])
@pytest.mark.parametrize("heads", [2, 10, 32])
def test_every_head_size_and_group_equals_rotation_before_attention(
    library: KernelLibrary, dtype: torch.dtype, size: int, heads: int
) -> None:
    """Sparse, dense and inactive rows; halves of a head that are no whole vectors; groups of 1, 5 and 16."""
    lengths = (200, 5, -1, 201)
    check(library, unrotated(step_case(lengths=lengths, capacity=201, heads=heads, size=size, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_many_rows_equal_rotation_before_attention(library: KernelLibrary, fp8: bool, dtype: torch.dtype) -> None:
    """Uses more rows than have room in clusters on any GPU."""
    lengths = [90 - row for row in range(MANY_ROWS)]
    check(library, unrotated(step_case(lengths=lengths, heads=8, size=64, dtype=dtype, fp8=fp8)))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_every_schedule_equals_rotation_before_attention(
    scheduled_library: KernelLibrary, fp8: bool, dtype: torch.dtype
) -> None:
    case = step_case(lengths=(300, 7), heads=8, size=64, top_r=23, dtype=dtype, fp8=fp8)
    check(scheduled_library, unrotated(case))


def test_rotated_attention_launches_no_extra_kernel(either: KernelLibrary) -> None:
    case = unrotated(step_case(lengths=[40, 41], dtype=torch.float16))
    for operator, plain, arguments in (
        (ROTATED_HYBRID_ATTENTION, either.hybrid_attention, case.step.arguments()),
        (ROTATED_DENSE_ATTENTION, either.dense_attention, case.step.dense_arguments()),
    ):
        rotated = partial(either.compute, operator, case.arguments(operator, "cpu"))
        launched = [either.launches_of(call) for call in (rotated, partial(plain, **arguments))]
        names = [[launch.name for launch in launches] for launches in launched]
        assert names[0] == names[1] != []


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_rotates_as_transformers_does(seed: int) -> None:
    """cos and sin of the whole head, and a head whose halves change places, the second negated."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    case = unrotated(step_case(lengths=[9, 8, 7], heads=8, size=64), seed)
    wide = [torch.cat([half, half], dim=-1)[:, None] for half in (case.cosines, case.sines)]
    query, key, _ = case.joined.split([8, 2, 2], dim=1)
    expected = apply_rotary_pos_emb(query[:, :, None], key[:, :, None], *wide)
    for found, wanted in zip((case.step.query, case.step.k_new), expected, strict=True):
        assert_close(found, wanted[:, :, 0], 1e-6)


@pytest.mark.parametrize("operator", [ROTATED_HYBRID_ATTENTION, ROTATED_DENSE_ATTENTION], ids=lambda one: one.name)
def test_mismatched_rotations_are_refused(emulation: KernelLibrary, operator: Operator) -> None:
    given = unrotated(step_case(lengths=[40, 41])).arguments(operator, "cpu")
    for changes, message in (
        ({"heads": 3}, "H\\+2G|joined"),
        ({"joined": given["joined"][:, :7]}, "joined"),
        ({"cosines": given["cosines"].double()}, "cosines .* expected torch.float32"),
        ({"sines": given["sines"][:, :5]}, "D/2|sines"),
        ({"heads": 0}, "heads is 0"),
    ):
        with pytest.raises((ValueError, KernelError), match=message):
            emulation.compute(operator, given | changes)


def test_heads_that_no_kv_heads_divide_are_refused(emulation: KernelLibrary) -> None:
    given = unrotated(step_case(lengths=[40, 41])).arguments(ROTATED_DENSE_ATTENTION, "cpu")
    wider = torch.cat([given["joined"][:, :1], given["joined"]], dim=1)
    with pytest.raises(KernelError, match=r"heads is 5; expected a multiple of 2 \(kv_heads\)"):
        emulation.compute(ROTATED_DENSE_ATTENTION, given | {"joined": wider, "heads": 5})
