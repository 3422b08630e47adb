"""The operators of experts by the native library, beside the reference, for every instruction set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kvc_trt.backends.onnxruntime.native import load
from kvc_trt.graph.rewrites.native import prepare
from kvc_trt.models.config import ClampedGate, Experts
from kvc_trt.models.quantisation import quantise
from kvc_trt.models.weights import ROUTER
from kvc_trt.operators.experts import GATE_GAIN, GATE_LIMIT, MATRICES
from kvc_trt.verify.rungs.parts.experts import ExpertCase, case_error, expert_case
from tests.expert_cases import BITS, CLAMPED, body_of, experts, numbers_of
from tests.graph.small_models import SingleNode
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode, native_session


def natively(case: ExpertCase, library: Path, threads: int = 1, *, wide: bool = False, **changes: int) -> np.ndarray:
    body = body_of(case.bits, clamped=case.clamped is not None)
    node = NativeNode(body, {**numbers_of(case, wide=wide), **changes}, library, threads)
    return node(*case.inputs.values())["y"]


def bar(bits: int | None, *, wide: bool = False) -> float:
    """Relative to the largest result in floats, to the bound of rounding inputs to 8 bits otherwise."""
    return 1e-5 if bits is None else 0.02 if wide else 1.0


WIDTHS = pytest.mark.parametrize(
    ("bits", "wide"), [*((bits, False) for bits in BITS), (4, True), (8, True)],
    ids=["floats", "4, narrow", "8, narrow", "4, wide", "8, wide"],
)  # fmt: skip
GATES = pytest.mark.parametrize("clamped", CLAMPED, ids=["swiglu", "clamped"])


@WIDTHS
@settings(max_examples=30, deadline=None)
@given(
    part=experts(), tokens=st.integers(1, 60), blocks=st.integers(1, 5), ties=st.booleans(),
    seed=st.integers(0, 1000), instructions=ANY_INSTRUCTIONS,
    clamped=st.none() | st.builds(ClampedGate, st.sampled_from((0.25, 1.0, 7.0)), st.floats(0.5, 2, width=32)),
)  # fmt: skip
def test_random_shapes_equal_the_reference(
    library: Path, bits: int | None, wide: bool, part: Experts, tokens: int, blocks: int, ties: bool, seed: int,
    instructions: str, clamped: ClampedGate | None,
) -> None:  # fmt: skip
    use_at_most(library, instructions)
    rng = np.random.default_rng(seed)
    case = expert_case(part, rng, tokens=tokens, hidden=32 * blocks, bits=bits, ties=ties, clamped=clamped)
    assert case_error(case, natively(case, library, wide=wide)) <= bar(bits, wide=wide)


@GATES
@pytest.mark.parametrize("size", [7, 33])
def test_widths_that_fill_no_vector_are_right(
    library: Path, instructions: str, size: int, clamped: ClampedGate | None
) -> None:
    case = expert_case(Experts(3, 2, size), np.random.default_rng(size), tokens=70, hidden=size + 2, clamped=clamped)
    assert case_error(case, natively(case, library)) <= bar(None)


@GATES
@WIDTHS
def test_a_prompt_of_several_batches_and_threads_is_its_tokens(
    library: Path, instructions: str, bits: int | None, wide: bool, clamped: ClampedGate | None
) -> None:
    case = expert_case(Experts(3, 2, 32), np.random.default_rng(5), tokens=1300, hidden=32, bits=bits, clamped=clamped)
    found = natively(case, library, threads=2, wide=wide)
    assert case_error(case, found) <= bar(bits, wide=wide)
    np.testing.assert_array_equal(natively(case, library, wide=wide), found)


@GATES
@pytest.mark.parametrize("bits", BITS)
def test_all_tokens_of_one_expert_are_right_and_others_are_not_read(
    library: Path, instructions: str, bits: int | None, clamped: ClampedGate | None
) -> None:
    case = expert_case(Experts(4, 1, 32), np.random.default_rng(6), tokens=40, hidden=64, bits=bits, clamped=clamped)
    towards = case.x.mean(axis=0)
    case.x[:] = np.abs(case.x)
    case.inputs["x"][:] = case.x
    for router in (case.inputs["router"], case.weights[ROUTER]):
        router[:] = 0 * towards
        router[2] = 1
    for name, tensor in case.inputs.items():
        if name.startswith(MATRICES) and name not in (GATE_LIMIT, GATE_GAIN) and tensor.dtype != np.uint8:
            tensor[[0, 1, 3]] = np.nan
    assert case_error(case, natively(case, library)) <= bar(bits)


@pytest.mark.parametrize("tokens", [10, 30, 80])
@GATES
@WIDTHS
def test_choices_of_other_tokens_do_not_change_a_bit_of_a_token(
    library: Path, instructions: str, bits: int | None, wide: bool, tokens: int, clamped: ClampedGate | None
) -> None:
    """The first token's expert computes it alone, or every token."""
    rng = np.random.default_rng(9)
    case = expert_case(Experts(4, 1, 160), rng, tokens=tokens, hidden=288, bits=bits, clamped=clamped)
    if clamped is not None:
        case.inputs["router_bias"][:] = 0
    case.inputs["router"][:, :] = 0
    case.inputs["router"][:2, 0] = 1, -1
    found = []
    for others in (1, -1):
        case.inputs["x"][:, 0] = others
        case.inputs["x"][0, 0] = 1
        found.append(natively(case, library, wide=wide)[0])
    np.testing.assert_array_equal(*found)


@GATES
@WIDTHS
def test_tokens_with_nan_or_infinity_change_no_bit_of_the_others(
    library: Path, instructions: str, bits: int | None, wide: bool, clamped: ClampedGate | None
) -> None:
    case = expert_case(Experts(3, 2, 64), np.random.default_rng(2), tokens=9, hidden=96, bits=bits, clamped=clamped)
    expected = natively(case, library, wide=wide)
    assert np.isfinite(expected).all()
    for token, value in ((1, np.nan), (4, np.inf), (7, -np.inf)):
        case.inputs["x"][token, 5] = value
    found = natively(case, library, wide=wide)
    others = [0, 2, 3, 5, 6, 8]
    np.testing.assert_array_equal(found[others], expected[others])
    assert np.isnan(found[[1, 4, 7]]).all()


@pytest.mark.parametrize("bits", BITS)
def test_both_sides_of_the_gate_are_clamped(library: Path, instructions: str, bits: int | None) -> None:
    """Matrices of zeros and units leave nothing but biases: gates and ups are those, the result is the clamped gate."""
    part, gate = Experts(2, 1, 32), ClampedGate(7.0, 1.702)
    case = expert_case(part, np.random.default_rng(1), tokens=2, hidden=32, bits=bits, clamped=gate)
    case.inputs["router"][:] = 0
    case.inputs["router_bias"][:] = 0, 1
    # The gate has no lower limit: there its sigmoid is 0.
    gates = np.repeat(np.array([-1e30, -200, -7.5, 0, 6.5, 7, 7.5, np.inf], np.float32), 4)
    ups = np.tile(np.array([-np.inf, -7.5, 6.5, np.inf], np.float32), 8)
    case.inputs["gate_bias"][1], case.inputs["up_bias"][1] = gates, ups
    units = np.eye(32, dtype=np.float32)
    for name, matrix in zip(MATRICES, (0 * units, 0 * units, units), strict=True):
        if bits is None:
            case.inputs[name][1] = matrix
        else:
            packed, scales = quantise(matrix, bits)
            case.inputs[f"{name}_packed"][1], case.inputs[f"{name}_scales"][1] = packed, scales
    g, u = np.minimum(gates, 7).astype(np.float64), np.clip(ups, -7, 7)
    expected = np.exp(-np.logaddexp(0, -1.702 * g)) * g * (u + 1) + case.inputs["down_bias"][1]
    found = natively(case, library, wide=bits is not None)
    if bits is None:
        np.testing.assert_allclose(found, [expected] * 2, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_allclose(found, [expected] * 2, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_a_bias_of_nan_reaches_the_tokens_of_its_expert_alone(library: Path, instructions: str) -> None:
    case = expert_case(Experts(2, 1, 32), np.random.default_rng(3), tokens=6, hidden=64, clamped=CLAMPED[1])
    case.inputs["router"][:] = 0
    case.inputs["router"][1, 0] = 9
    case.inputs["router_bias"][:] = 0
    case.inputs["x"][:, 0] = [1, -1, 1, 1, -1, -1]
    expected = natively(case, library)
    for name in ("gate_bias", "up_bias", "down_bias"):
        changed = case.inputs[name].copy()
        changed[1, 3] = np.nan
        found = natively(replace(case, inputs={**case.inputs, name: changed}), library)
        np.testing.assert_array_equal(found[[1, 4, 5]], expected[[1, 4, 5]])
        assert np.isnan(found[[0, 2, 3]]).any(axis=1).all()


def test_nodes_of_an_older_engine_whose_body_holds_the_gates_numbers_run_that_body(library: Path) -> None:
    gate = CLAMPED[1]
    assert gate is not None
    case = expert_case(Experts(4, 2, 32), np.random.default_rng(4), tokens=5, hidden=64, clamped=gate)
    model = SingleNode(body_of(None, clamped=True), numbers_of(case)).model(("float32",) * len(case.inputs))
    numbers = {GATE_LIMIT: gate.limit, GATE_GAIN: gate.gain}
    constants = [helper.make_node("Constant", [], [name], value_floats=[value]) for name, value in numbers.items()]
    (body,), (node,) = model.functions, model.graph.node
    rest = [*constants, *body.node]
    del body.node[:], body.input[-2:], node.input[-2:], model.graph.input[-2:]
    body.node.extend(rest)
    native = load(library)
    prepared = prepare(model, native.operators)
    assert [one.op_type for one in prepared.graph.node] == ["KvcClampedExperts_body"]
    inputs = {name: value for name, value in case.inputs.items() if name not in numbers}
    (y,) = native_session(prepared, native).run(None, inputs)
    assert case_error(case, y) <= bar(None)


def test_numbers_of_the_gate_are_one_each(library: Path) -> None:
    case = expert_case(Experts(3, 2, 32), np.random.default_rng(8), hidden=64, clamped=CLAMPED[1])
    numbers = dict.fromkeys((GATE_LIMIT, GATE_GAIN), np.ones(2, np.float32))
    case = replace(case, inputs={**case.inputs, **numbers})
    with pytest.raises(Exception, match="gate_limit: expected 1 number, found 2"):
        natively(case, library)


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
