"""Every policy that an engine can have, and every form of one that no kernel serves, with small constants."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from kvc_trt import policies
from kvc_trt.backends.torch.policy_path import policy_path
from kvc_trt.engine.program import Program
from kvc_trt.graph.state import state_tensors
from kvc_trt.methods.parameters import PolicyParameters
from tests.small_model import SMALL

SCORES = ((0.9, 0.1), (0.2, 0.8), (0.3, 0.1))
SETTINGS = {
    "snapkv": {"window": 8, "pool_kernel": 7},
    "pyramidkv": {"window": 8, "pool_kernel": 7},
    "rocketkv-mt": {"window": 16},
    "h2o": {"recent": 20},
    "quest": {"skip_layers": 0},
}
FORMS = {
    "duo-attention, two caches in a layer": {"token_budget": 150, "sinks": 4, "recent": 20, "head_scores": SCORES},
    "streaming-llm, positions of the cache": {"positions": "cache"},
    "quest, a skipped layer": {"skip_layers": 1},
    "sparq, without the mean value": {"reallocate": False},
    "quest, bounds in fp8": {"fp8_bounds": True},
    "rocketkv, bounds in fp8": {"fp8_bounds": True},
    "h2o, a budget for each layer": {"layer_budget": "squeeze", "layer_budgets": (120, 90, 78)},
}
EVERY = tuple(one.name for one in policies.describe() if not policies.named(one.name).selection.oracle)
CASES = (*EVERY, *FORMS)


def parameters_of(name: str, **changes: Any) -> PolicyParameters:
    """The parameters of a case for the small model."""
    policy, settings = case(name)
    return policies.resolve(policy, model=SMALL, **{"max_input_len": 256, "max_output_len": 40, **settings, **changes})


def case(name: str) -> tuple[str, dict[str, Any]]:
    """The policy of a case, and its settings."""
    policy = name.partition(",")[0]
    return policy, {"token_budget": 96, **SETTINGS.get(policy, {}), **FORMS.get(name, {})}


TAKING_TURNS = tuple(name for name in CASES if parameters_of(name).no_turn is None)
CHECKING_DRAFTS = tuple(name for name in CASES if parameters_of(name).no_drafts is None)


def with_turns(program: Program) -> Program:
    """The program with what turns need, where its policy takes them."""
    turns = program.parameters.no_turn is None
    state = state_tensors(program.model, program.parameters, program.dtype, turns=turns)
    return replace(program, state=state, extend=program.prefill if turns else None)


@cache
def without_kernels() -> tuple[str, ...]:
    """The policies that run as PyTorch operations in some part, which needs the package onnx."""
    return tuple(name for name in EVERY if policy_path(SMALL, parameters_of(name)) is not None)
