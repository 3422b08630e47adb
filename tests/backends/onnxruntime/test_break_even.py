from __future__ import annotations

import dataclasses

import pytest

from kvc_trt import policies
from kvc_trt.backends.break_even import first_length_won, lengths_to_try, remembered
from kvc_trt.backends.onnxruntime import benchmark as module
from kvc_trt.backends.onnxruntime.benchmark import break_even
from kvc_trt.files.cache import cache_root
from kvc_trt.models.sources.hugging_face import read_config


@pytest.fixture
def model(tiny_model):
    return read_config(tiny_model)


@pytest.fixture
def parameters(model):
    return policies.resolve("rocketkv", model=model, token_budget=32, max_input_len=512, max_output_len=32)


def test_lengths_grow_from_the_budget_to_the_capacity(parameters):
    lengths = lengths_to_try(parameters)
    assert lengths[0] == 33
    assert lengths[-1] == parameters.capacity
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize(
    ("dense_wins_at", "expected"),
    [([], 32), ([33], 33), ([33, 41], 41), ([33, 41, 51], 51), ([51], 51)],
)
def test_dense_is_kept_up_to_the_last_length_it_wins(dense_wins_at, expected):
    dense = lambda length: 1.0 if length in dense_wins_at else 3.0  # noqa: E731
    assert first_length_won([33, 41, 51], lambda length: 2.0, dense) == expected


def test_sparse_and_dense_steps_are_measured_and_the_answer_is_kept(model, parameters, monkeypatch):
    found = break_even(model, parameters, "float32")
    assert parameters.token_budget <= found <= parameters.capacity
    monkeypatch.setattr(module, "_measure", lambda *arguments: pytest.fail("measured again"))
    assert break_even(model, parameters, "float32") == found
    other = dataclasses.replace(parameters, top_k=parameters.top_k + 1)
    with pytest.raises(pytest.fail.Exception):
        break_even(model, other, "float32")


@pytest.mark.parametrize(
    "content", ["[1]", "true", "-3", "1e999", "NaN", str(10**18), "9" * 5000, '"33"', "", "[" * 60]
)
def test_a_stored_value_that_is_no_length_is_measured_again(content):
    remembered({"machine": 1}, lambda: 33)
    (kept,) = (cache_root() / "break-even").iterdir()
    kept.write_text(content)
    assert remembered({"machine": 1}, lambda: 40) == 40
    assert remembered({"machine": 1}, lambda: pytest.fail("measured again")) == 40


def test_a_cache_within_the_budget_needs_no_measurement(model, parameters):
    small = dataclasses.replace(parameters, capacity=32)
    assert break_even(model, small, "float32") == 32
