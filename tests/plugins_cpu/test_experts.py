"""KvcExperts and KvcQuantisedExperts by the native library, beside the reference, for every instruction set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.models.config import Experts
from kvc_trt.models.weights import ROUTER
from kvc_trt.verify.rungs.parts.experts import ExpertCase, case_error, expert_case
from tests.expert_cases import BITS, body_of, experts, numbers_of
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode


def natively(case: ExpertCase, library: Path, threads: int = 1, *, wide: bool = False, **changes: int) -> np.ndarray:
    node = NativeNode(body_of(case.bits), {**numbers_of(case, wide=wide), **changes}, library, threads)
    return node(*case.inputs.values())["y"]


def bar(bits: int | None, *, wide: bool = False) -> float:
    """Relative to the largest result in floats, to the bound of rounding inputs to 8 bits otherwise."""
    return 1e-5 if bits is None else 0.02 if wide else 1.0


WIDTHS = pytest.mark.parametrize(
    ("bits", "wide"), [*((bits, False) for bits in BITS), (4, True), (8, True)],
    ids=["floats", "4, narrow", "8, narrow", "4, wide", "8, wide"],
)  # fmt: skip


@WIDTHS
@settings(max_examples=30, deadline=None)
@given(
    part=experts(), tokens=st.integers(1, 60), blocks=st.integers(1, 5), ties=st.booleans(),
    seed=st.integers(0, 1000), instructions=ANY_INSTRUCTIONS,
)  # fmt: skip
def test_random_shapes_equal_the_reference(
    library: Path, bits: int | None, wide: bool, part: Experts, tokens: int, blocks: int, ties: bool, seed: int,
    instructions: str,
) -> None:  # fmt: skip
    use_at_most(library, instructions)
    rng = np.random.default_rng(seed)
    case = expert_case(part, rng, tokens=tokens, hidden=32 * blocks, bits=bits, ties=ties)
    assert case_error(case, natively(case, library, wide=wide)) <= bar(bits, wide=wide)


@pytest.mark.parametrize("size", [7, 33])
def test_widths_that_fill_no_vector_are_right(library: Path, instructions: str, size: int) -> None:
    case = expert_case(Experts(3, 2, size), np.random.default_rng(size), tokens=70, hidden=size + 2)
    assert case_error(case, natively(case, library)) <= bar(None)


@WIDTHS
def test_a_prompt_of_several_batches_and_threads_is_its_tokens(
    library: Path, instructions: str, bits: int | None, wide: bool
) -> None:
    case = expert_case(Experts(3, 2, 32), np.random.default_rng(5), tokens=1300, hidden=32, bits=bits)
    found = natively(case, library, threads=2, wide=wide)
    assert case_error(case, found) <= bar(bits, wide=wide)
    np.testing.assert_array_equal(natively(case, library, wide=wide), found)


@pytest.mark.parametrize("bits", BITS)
def test_all_tokens_of_one_expert_are_right_and_others_are_not_read(
    library: Path, instructions: str, bits: int | None
) -> None:
    case = expert_case(Experts(4, 1, 32), np.random.default_rng(6), tokens=40, hidden=64, bits=bits)
    towards = case.x.mean(axis=0)
    case.x[:] = np.abs(case.x)
    case.inputs["x"][:] = case.x
    for router in (case.inputs["router"], case.weights[ROUTER]):
        router[:] = 0 * towards
        router[2] = 1
    for name, tensor in case.inputs.items():
        if name not in ("x", "router") and tensor.dtype != np.uint8:
            tensor[[0, 1, 3]] = np.nan
    assert case_error(case, natively(case, library)) <= bar(bits)


@pytest.mark.parametrize("tokens", [10, 30, 80])
@WIDTHS
def test_choices_of_other_tokens_do_not_change_a_bit_of_a_token(
    library: Path, instructions: str, bits: int | None, wide: bool, tokens: int
) -> None:
    """The first token's expert computes it alone, or every token."""
    case = expert_case(Experts(4, 1, 160), np.random.default_rng(9), tokens=tokens, hidden=288, bits=bits)
    case.inputs["router"][:, :] = 0
    case.inputs["router"][:2, 0] = 1, -1
    found = []
    for others in (1, -1):
        case.inputs["x"][:, 0] = others
        case.inputs["x"][0, 0] = 1
        found.append(natively(case, library, wide=wide)[0])
    np.testing.assert_array_equal(*found)


def test_nan_router_logits_rank_below_every_number(library: Path, instructions: str) -> None:
    case = expert_case(Experts(4, 2, 32), np.random.default_rng(7), tokens=5, hidden=64)
    case.inputs["router"][1] = np.nan
    rest = [0, 2, 3]
    spared = {
        name: tensor if name == "x" else np.ascontiguousarray(tensor[rest]) for name, tensor in case.inputs.items()
    }
    # The softmax runs over all experts, so that every weight is NaN too.
    assert np.isnan(natively(case, library)).all()
    assert np.isfinite(natively(replace(case, inputs=spared), library)).all()


@pytest.mark.parametrize(
    ("bits", "changes", "message"),
    [
        (None, {"chosen": 4}, "attribute chosen: expected at most 3 experts, found 4"),
        (4, {"bits": 5}, "attribute bits: expected 4 or 8, found 5"),
        (4, {"block": 64}, "attribute block: expected 32, found 64"),
        (4, {"bits": 8}, "attribute bits: expected Bytes = 16, found 32"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(
    library: Path, bits: int | None, changes: dict[str, int], message: str
) -> None:
    case = expert_case(Experts(3, 2, 32), np.random.default_rng(8), hidden=64, bits=bits)
    with pytest.raises(Exception, match=message):
        natively(case, library, **changes)
