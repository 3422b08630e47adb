"""KvcLayerBudgets, alone, beside the reference: the integers must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.backends.harness import EngineOperator
from kvc_trt.methods.base.isolated_runs import PromptCase
from kvc_trt.reference.model.squeeze import squeeze
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.rankings.array_errors import exact, larger

if TYPE_CHECKING:
    from kvc_trt.policies import PolicyParameters


def check_layer_budgets(
    operator: EngineOperator, cases: Sequence[PromptCase], rule: PolicyParameters, layers: int
) -> list[Check]:
    """Run the operator on cosines of `layers` layers for the prompts of each case."""
    error = 0.0
    for case in cases:
        error = larger(error, _error(operator, case, rule, layers))
    where = f"{operator.nodes} nodes: {', '.join(case.name for case in cases)}"
    return [at_most(f"{operator.name} caches", f"{len(cases)} cases", error, 0.0, note=where)]


def _error(operator: EngineOperator, case: PromptCase, rule: PolicyParameters, layers: int) -> float:
    """Run the operator on random cosines, or on eighths, which repeat."""
    division, lengths = rule.division, case.prompt_lengths
    assert division is not None
    shape, rng = (layers, len(lengths)), np.random.default_rng(len(case.name))
    table = rng.uniform(0.2, 1, shape) if case.name == "random" else rng.integers(1, 9, shape) / 8
    cosines = table.astype(np.float32)
    (budgets,) = operator.run(cosines=cosines, prompt_lengths=lengths)
    expected = [
        squeeze(
            column, division.budget, share=division.share, minimum=division.least, maximum=min(division.most, n)
        ).budgets
        for column, n in zip(cosines.T.tolist(), lengths.tolist(), strict=True)
    ]
    return exact(budgets, np.array(expected, np.int64).T)
