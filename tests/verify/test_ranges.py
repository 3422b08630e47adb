"""Numbers that a type cannot hold: `verify` names the first tensor that leaves its range, and what fits passes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.verify.ladder import verify
from kvc_trt.verify.ranges import Ranges
from tests.verify.test_ladder import failed_rungs, rung

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def scaled(monkeypatch):
    """`scaled(name, factor)`: from now on, random weights of that name are multiplied."""
    drawn = RandomWeights.read_rows

    def scale(name, factor):
        def read_rows(self, tensor, start, stop):
            rows = drawn(self, tensor, start, stop)
            return rows * np.float32(factor) if tensor == name else rows

        monkeypatch.setattr(RandomWeights, "read_rows", read_rows)

    return scale


def verified(make_engine, parameters, weights="fp32"):
    return verify(make_engine(parameters, weights=weights), level="logits", steps=2)


def check_of(report, activations):
    return next(one for one in rung(report, "logits").checks if one.name == f"activations beyond {activations}")


def test_an_overflow_of_float16_names_the_matrix_whose_product_it_is(scaled, make_engine, parameters_for):
    scaled(DOWN, 3e5)
    report = verified(make_engine, parameters_for(), "fp16")
    assert "logits" in failed_rungs(report)
    assert report.failures[0].startswith("logits: activations beyond float16 is")
    assert "the first is the product of model.layers.1.mlp.down_proj:" in report.failures[0]
    assert "float16 ends at 65504" in report.failures[0]
    json.dumps(report.to_json(), allow_nan=False)


def test_weights_that_overflow_float16_pass_in_float32(scaled, make_engine, parameters_for):
    scaled(DOWN, 3e5)
    report = verified(make_engine, parameters_for())
    assert report.passed, report.failures
    assert check_of(report, "float32").measured == 0


def test_a_norm_that_gives_zeros_is_named_though_all_logits_agree(scaled, make_engine, parameters_for):
    """1e30 is a float32, its square is not: both sides answer alike, and the layer is lost to both."""
    scaled(DOWN, 1e30)
    report = verified(make_engine, parameters_for())
    assert [one.name for one in rung(report, "logits").checks if one.passed is False] == ["activations beyond float32"]
    assert "the residual stream after model.layers.1.mlp: up to" in report.failures[0]
    assert "mean square overflows float32" in report.failures[0]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("factor", [1e-40, 0.0])
def test_denormal_and_zero_weights_pass(scaled, make_engine, parameters_for, weights, factor):
    scaled(DOWN, factor)
    report = verified(make_engine, parameters_for(), weights)
    assert report.passed, report.failures


@pytest.mark.parametrize(
    ("activations", "values", "expected"),
    [
        ("float16", [1.0, 65504.0], ""),
        ("float16", [1.0, -65536.0], "6.6e+04, where float16 ends at 65504"),
        ("bfloat16", [1e38], ""),
        ("float32", [3e38], ""),
        ("float32", [float("inf")], "inf, where float32 ends at 3.4028e+38"),
        ("float32", [float("nan"), float("inf")], "it holds NaN"),
    ],
)
def test_numbers_beyond_the_range_of_a_type_are_named(activations, values, expected):
    ranges = Ranges(activations)
    ranges.measure("x", torch.tensor([0.0]))
    ranges.measure("y", torch.tensor(values))
    assert ranges.first == (f"the first is y: {expected}" if expected else "")


def test_the_first_tensor_out_of_range_stays_the_one_named():
    ranges = Ranges("float16")
    for name, value in (("x", 1e5), ("y", 1e6), ("x", 1e7)):
        ranges.measure(name, torch.tensor([value]))
    assert ranges.first.startswith("the first is x: 1e+05")
    assert (ranges.measured, len(ranges.beyond)) == (3, 2)
