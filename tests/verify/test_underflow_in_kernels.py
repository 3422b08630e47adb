"""Operators of whole engines, by the emulated kernels, on softmax weights that underflow: the reference's choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.single_operator import SingleOperator
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.methods.base.registry import operators
from kvc_trt.verify.rungs.operators import run_case
from tests.plugins_cuda.conftest import emulation
from tests.verify.underflowing import POLICIES, underflowing

__all__ = ["emulation"]


@dataclass
class KernelOperator:
    """An operator of an engine, by the library's kernels instead of its body."""

    operator: SingleOperator
    library: KernelLibrary

    def __post_init__(self) -> None:
        self.name = self.operator.name

    def run(self, **inputs):
        schema, device = operators()[self.name], self.library.device_type
        given = {name: torch.from_numpy(np.array(table, order="C")).to(device) for name, table in inputs.items()}
        made = self.library.compute(schema, {**given, **self.operator.attributes})
        return [(made[one.name] if one.alias is None else given[one.alias]).cpu().numpy() for one in schema.outputs]


@pytest.mark.parametrize("policy", ["rocketkv", "pyramidkv", "snapkv"])
def test_kernels_choose_by_the_rule_where_weights_underflow(
    policy: str, emulation: KernelLibrary, make_engine, parameters_for
) -> None:
    engine = make_engine(parameters_for(policy, **POLICIES[policy]), turns=True)
    ran = set()
    for operator, case, rule in underflowing(harness_for(engine, RunOptions("onnxruntime", 1)).operators(), engine):
        outcome = run_case(KernelOperator(operator, emulation), case, rule)
        assert outcome.indices.compared
        assert not outcome.indices.wrong, f"{operator.name}: {outcome.indices.wrong}"
        ran.add(operator.name)
    assert ran == {"KvcCompact", "KvcCompactTurn", *(["KvcHybridAttention"] if policy == "rocketkv" else [])}
