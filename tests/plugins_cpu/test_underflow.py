"""Native operators on softmax weights that underflow: the reference's choices, in each instruction set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvc_trt.backends.onnxruntime import native
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.single_operator import SingleOperator
from kvc_trt.graph.rewrites.native import prepare
from kvc_trt.verify.rungs.operators import run_case
from tests.plugins_cpu.native_node import native_session
from tests.verify.conftest import make_engine, parameters_for
from tests.verify.underflowing import POLICIES, underflowing

__all__ = ["make_engine", "parameters_for"]


@dataclass
class NativeOperator:
    """An operator of an engine, by the library instead of its body."""

    operator: SingleOperator
    library: native.NativeOperators

    def __post_init__(self) -> None:
        self.name = self.operator.name
        self._session = native_session(prepare(self.operator.model, self.library.operators), self.library)

    def run(self, **inputs):
        return self._session.run(None, {name: inputs[name] for name in self.operator.inputs})


@pytest.mark.parametrize("policy", ["rocketkv", "pyramidkv", "snapkv"])
def test_native_operators_choose_by_the_rule_where_weights_underflow(
    policy: str, library: Path, instructions: str, make_engine, parameters_for
) -> None:
    loaded = native.load(library)
    engine = make_engine(parameters_for(policy, **POLICIES[policy]), turns=True)
    ran = set()
    for operator, case, rule in underflowing(harness_for(engine, RunOptions("onnxruntime", 1)).operators(), engine):
        outcome = run_case(NativeOperator(operator, loaded), case, rule)
        assert outcome.indices.compared
        assert not outcome.indices.wrong, f"{operator.name}: {outcome.indices.wrong}"
        ran.add(operator.name)
    assert ran <= loaded.operators
    assert ran == {"KvcCompact", "KvcCompactTurn", *(["KvcHybridAttention"] if policy == "rocketkv" else [])}
