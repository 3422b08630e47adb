"""One prefill for all policies: the engine's own graph, cut in two, gives the engine's own result."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.policy_engines import open_model
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.prefill import shared_prefill
from kvc_trt.backends.onnxruntime.prefill.shared_prefill import SharedPrefill, SharingExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.runtime.executor import Prefilled

VARIANTS = [
    Variant("full", None),
    Variant("rocketkv", 32),
    Variant("hybrid", 32),
    Variant("snapkv-gqa", 64),
]
ROOM = Room(120, 8)


@pytest.fixture(scope="module")
def programs():
    with open_model("retrieval-tiny") as model:
        yield [model.program(variant, ROOM) for variant in VARIANTS]


@pytest.fixture
def prompts():
    """Two rows, one of them padded."""
    ids = np.random.default_rng(0).integers(6, 300, (2, 128))
    ids[0, 120:] = 0
    ids[1, 50:] = 0
    return ids, np.array([120, 50])


def executors(programs, shared):
    halves = [shared.split(program) for program in programs]
    return [
        SharingExecutor(program, shared, half, RunOptions(threads=1))
        for program, half in zip(programs, halves, strict=True)
    ]


def alone(program, prompts):
    """Return the engine's own prefill of each row alone, put together."""
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1))
    rows = [executor.prefill(prompts[0][row : row + 1], prompts[1][row : row + 1]) for row in range(len(prompts[1]))]
    state = {name: np.concatenate([row.state[name] for row in rows]) for name in rows[0].state}
    lengths = np.concatenate([row.cache_lengths for row in rows], axis=1)
    return Prefilled(np.concatenate([row.logits for row in rows]), lengths, state)


def test_every_policy_gets_its_own_prefill_bit_for_bit_from_one_run_per_prompt(programs, prompts):
    shared = SharedPrefill(programs[0].weight_file.path.parent)
    for program, executor in zip(programs, executors(programs, shared), strict=True):
        found, expected = executor.prefill(*prompts), alone(program, prompts)
        np.testing.assert_array_equal(found.logits, expected.logits)
        np.testing.assert_array_equal(found.cache_lengths, expected.cache_lengths)
        assert found.state.keys() == expected.state.keys()
        for name, values in expected.state.items():
            np.testing.assert_array_equal(found.state[name], values)
    assert shared.runs == 2


def test_other_prompts_and_forgotten_ones_are_computed(programs, prompts):
    ids, lengths = prompts
    shared = SharedPrefill(programs[0].weight_file.path.parent)
    (executor,) = executors(programs[:1], shared)
    executor.prefill(ids, lengths)
    executor.prefill(ids[::-1], lengths[::-1])
    assert shared.runs == 2
    executor.prefill(ids, lengths - 1)
    assert shared.runs == 4
    executor.prefill(ids, lengths)
    assert shared.runs == 4
    shared.forget()
    executor.prefill(ids, lengths)
    assert shared.runs == 6


def test_prompts_that_do_not_fit_in_memory_are_kept_in_files(programs, prompts, monkeypatch):
    directory = programs[0].weight_file.path.parent
    before = sorted(directory.iterdir())
    monkeypatch.setattr(shared_prefill, "REMEMBERED_BYTES", 1)
    shared = SharedPrefill(directory)
    (executor, other) = executors(programs[:2], shared)
    executor.prefill(*prompts)
    found, expected = other.prefill(*prompts), alone(programs[1], prompts)
    assert shared.runs == 2
    for name, values in expected.state.items():
        np.testing.assert_array_equal(found.state[name], values)
    assert sorted(directory.iterdir()) == before  # files without names


def test_values_that_are_computed_again_take_the_place_of_the_first(programs, prompts, monkeypatch):
    """An engine that reads more than those before it has a prompt run again: memory for all of it is enough."""

    def remembered():
        shared = SharedPrefill(programs[0].weight_file.path.parent)
        for program in programs:
            executors([program], shared)[0].prefill(*prompts)
        assert shared.runs > 2
        return [value for values in shared._values.values() for value in values.values()]

    needed = sum(value.tensor_size_in_bytes() for value in remembered())
    monkeypatch.setattr(shared_prefill, "REMEMBERED_BYTES", needed)
    monkeypatch.setattr(shared_prefill, "_in_file", lambda *arguments: pytest.fail("there is memory"))
    remembered()
