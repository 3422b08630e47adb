from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvc_trt.models.quantisation import dequantise
from kvc_trt.verify.rungs.parts.quantised import check_quantised

ATTRIBUTES = {"in_features": 128, "out_features": 40, "bits": 4, "block": 32}


def linear(damage=0.0, levels=127):
    """Return the linear operator in numpy, with an input of fewer levels or one damaged output."""

    def run(x, packed, scales):
        steps = np.abs(x).reshape(len(x), -1, 32).max(axis=2).repeat(32, axis=1) / levels
        result = np.rint(x / steps) * steps @ dequantise(packed, scales, 4).T
        result[1, 7] += damage
        return [result]

    return SimpleNamespace(name="KvcQuantisedLinear", nodes=1, attributes=ATTRIBUTES, run=run)


def rows(damage=0.0):
    def run(rows, packed, scales):
        result = dequantise(packed, scales, 4)[rows]
        result[-1, -1] += damage
        return [result]

    return SimpleNamespace(name="KvcQuantisedRows", nodes=1, attributes=ATTRIBUTES, run=run)


@pytest.mark.parametrize("operator", [linear(), rows()], ids=lambda operator: operator.name)
def test_the_operators_pass_as_defined(operator):
    assert [check.passed for check in check_quantised(operator, 0)] == [True]


@pytest.mark.parametrize(
    "operator",
    [linear(damage=20.0), linear(damage=np.nan), linear(levels=15), rows(damage=1e-3), rows(damage=np.nan)],
    ids=["off", "NaN", "too few levels", "row off", "row NaN"],
)
def test_a_damaged_quantised_operator_fails_its_check(operator):
    assert [check.passed for check in check_quantised(operator, 0)] == [False]
