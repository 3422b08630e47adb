"""KvcExperts and KvcQuantisedExperts by their bodies, and the torch backend's two ways, beside the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.torch.model import experts as in_torch
from kvc_trt.models.config import ClampedGate, Experts
from kvc_trt.models.weights import EXPERT_BIASES, EXPERT_MATRICES, ROUTER, ROUTER_BIAS
from kvc_trt.reference.model.experts import mixed, routed
from kvc_trt.verify.rungs.parts.experts import ExpertCase, case_error, expert_case
from tests.expert_cases import BITS, CLAMPED, body_of, experts, numbers_of
from tests.graph.small_models import SingleNode


def by_body(case: ExpertCase) -> np.ndarray:
    node = SingleNode(body_of(case.bits, clamped=case.clamped is not None), numbers_of(case))
    return node(*case.inputs.values())["y"]


def in_pytorch(case: ExpertCase) -> dict[str, torch.Tensor]:
    """Return the layer's tensors as the torch backend joins them."""
    weights = {name: torch.from_numpy(value) for name, value in case.weights.items()}
    gate, up, down = EXPERT_MATRICES
    joined = torch.cat([weights[gate], weights[up]])
    found = {ROUTER: weights[ROUTER], "mlp.experts.gate_up_proj.weight": joined, down: weights[down]}
    if case.clamped is not None:
        gate, up, down = EXPERT_BIASES
        found |= {name: weights[name] for name in (ROUTER_BIAS, down)}
        found["mlp.experts.gate_up_proj.bias"] = torch.cat([weights[gate], weights[up]])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("clamped", CLAMPED)
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=20, deadline=None)
@given(part=experts(), tokens=st.integers(1, 9), ties=st.booleans(), seed=st.integers(0, 1000))
def test_the_body_computes_the_reference(
    bits: int | None, clamped: ClampedGate | None, part: Experts, tokens: int, ties: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    case = expert_case(part, rng, tokens=tokens, hidden=64, bits=bits, ties=ties, clamped=clamped)
    assert case_error(case, by_body(case)) <= (1e-5 if bits is None else 1.0)
    # The body rounds no input.
    assert case_error(replace(case, bits=None), by_body(case)) <= 1e-5


@pytest.mark.parametrize("clamped", CLAMPED)
@settings(max_examples=30, deadline=None)
@given(part=experts(), tokens=st.integers(1, 9), ties=st.booleans(), seed=st.integers(0, 1000))
def test_pytorch_computes_the_reference_grouped_and_gathered(
    clamped: ClampedGate | None, part: Experts, tokens: int, ties: bool, seed: int
) -> None:
    case = expert_case(part, np.random.default_rng(seed), tokens=tokens, hidden=64, ties=ties, clamped=clamped)
    weights, x = in_pytorch(case), torch.from_numpy(case.x)
    chosen, shares = in_torch.routed(weights[ROUTER], x, part, weights.get(ROUTER_BIAS))
    for compute in (in_torch.grouped, in_torch.gathered):
        found = compute(weights, x, part, chosen, shares, clamped)
        assert case_error(case, found.numpy()) <= 1e-5


def test_equal_logits_choose_the_lowest_index() -> None:
    """With a router of zeros every expert has the same logit, and the first ones compute every token."""
    case = expert_case(Experts(5, 2, 32), np.random.default_rng(0), hidden=64)
    case.inputs["router"][:] = 0
    case.weights[ROUTER][:] = 0
    first = replace(case, weights={**case.weights, **{
        name: case.weights[name][: 2 * len(case.weights[name]) // 5] for name in EXPERT_MATRICES
    }, ROUTER: case.weights[ROUTER][:2]}, part=Experts(2, 2, 32))  # fmt: skip
    assert case_error(first, by_body(case)) <= 1e-5
    chosen, shares = routed(torch.zeros(3, 5), 2, normalised=False)
    assert chosen.tolist() == [[0, 1]] * 3
    assert shares.tolist() == [[pytest.approx(0.2)] * 2] * 3


def test_an_expert_that_no_token_chooses_is_not_read() -> None:
    """Its matrices are NaN: any product with them would show."""
    case = expert_case(Experts(4, 1, 32), np.random.default_rng(3), tokens=2, hidden=64)
    logits = torch.from_numpy(case.x @ case.weights[ROUTER].T)
    unread = set(range(4)) - set(routed(logits, 1, normalised=True)[0].flatten().tolist())
    for name in ("gate", "up", "down"):
        case.inputs[name][list(unread)] = np.nan
    assert np.isfinite(by_body(case)).all()


def test_the_shared_expert_is_weighted_by_a_sigmoid() -> None:
    part = Experts(3, 1, 8, shared_size=16)
    generator = torch.Generator().manual_seed(0)
    shapes = {ROUTER: (3, 4), **dict(zip(EXPERT_MATRICES, ((24, 4), (24, 4), (12, 8)), strict=True))}
    shapes |= {f"mlp.shared_expert.{name}_proj.weight": (16, 4) for name in ("gate", "up")}
    shapes |= {"mlp.shared_expert.down_proj.weight": (4, 16), "mlp.shared_expert_gate.weight": (1, 4)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(5, 4, generator=generator)
    alone = mixed(weights, x, replace(part, shared_size=0))
    gate, up, down = (weights[f"mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
    shared = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    share = 1 / (1 + torch.exp(-(x @ weights["mlp.shared_expert_gate.weight"].T)))
    torch.testing.assert_close(mixed(weights, x, part), alone + share * shared)
