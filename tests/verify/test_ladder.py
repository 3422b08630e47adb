"""An honest engine passes; every kind of broken one fails, and is caught by the rung that should catch it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from kvc_trt.errors import InputError
from kvc_trt.operators.compaction import compact as compact_function
from kvc_trt.operators.shapes import count_to, size
from kvc_trt.verify.ladder import verify
from kvc_trt.verify.report import Report


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rung(report: Report, name: str):
    return next(rung for rung in report.rungs if rung.name == name)


def failed_rungs(report: Report) -> set[str]:
    return {rung.name for rung in report.rungs if rung.status == "failed"}


@pytest.mark.parametrize("policy", ["rocketkv", "snapkv++", "hybrid", "full"])
def test_an_honest_engine_passes(policy, make_engine, parameters_for):
    report = verify(make_engine(parameters_for(policy)), steps=4)
    assert report.passed, report.failures
    assert {r.name for r in report.rungs if r.status == "passed"} >= {"ops", "logits", "tokens"}
    assert report.halves.engine.max_logit_error < 1e-5
    assert report.halves.engine.greedy_match == 1.0
    retrieval = rung(report, "retrieval")
    assert (retrieval.status, "no tokenizer" in retrieval.reason) == ("not applicable", True)
    if policy == "full":
        assert rung(report, "dense twin").reason == "a full engine is its own dense twin"
        assert rung(report, "activity").status == "not applicable"
        assert report.halves.compression is None
    else:
        assert rung(report, "dense twin").status == "passed"
        assert rung(report, "activity").status == "passed"
        assert report.halves.compression.max_logit_error > report.halves.engine.max_logit_error


def test_skipped_layers_stay_dense(make_engine, parameters_for):
    report = verify(make_engine(parameters_for(skip_layers=1)), steps=3)
    assert report.passed, report.failures
    assert {layer["layer"] for layer in rung(report, "activity").layers} == {1}


def test_an_engine_too_small_to_evict_is_reported(make_engine, parameters_for):
    report = verify(make_engine(parameters_for(token_budget=512)), steps=3)
    assert report.passed, report.failures
    activity = rung(report, "activity")
    assert (activity.status, "nothing to compress" in activity.reason) == ("not applicable", True)
    assert "nothing is compressed" in report.halves.notes["compression"]


METHODS = (
    "quest", "quest-matched", "sparq", "h2o", "h2o, a budget for each layer", "streaming-llm, positions of the cache",
    "streaming-llm, a budget for each layer", "sliding-window", "tova", "tova, a budget for each layer", "keydiff",
    "expected-attention", "expected-attention-hybrid", "expected-attention-hybrid, a budget for each layer",
    "duo-attention, two caches in a layer", "snapkv", "pyramidkv", "rocketkv, a budget for each layer",
    "rocketkv, budgets from the prompt",
)  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("policy", METHODS)
def test_an_honest_engine_of_any_method_passes(policy, make_engine, parameters_for):
    report = verify(make_engine(parameters_for(policy)), steps=4)
    assert report.passed, report.failures
    assert {r.name for r in report.rungs if r.status == "passed"} >= {
        "ops",
        "logits",
        "tokens",
        "dense twin",
        "activity",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "caught_by"),
    [
        ({"pool_kernel": 1}, "ops"),
        ({"pool_kernel": 9}, "ops"),
        ({"top_k": 28}, "ops"),
        ({"top_k": 28}, "activity"),
        ({"top_r": 3}, "ops"),
        ({"dense_until": 96}, "activity"),
        ({"window": 12}, "ops"),
    ],
)
def test_graphs_of_other_parameters_are_caught(change, caught_by, make_engine, parameters_for):
    claimed = parameters_for()
    report = verify(make_engine(claimed, replace(claimed, **change)), steps=4)
    assert not report.passed
    assert caught_by in failed_rungs(report)


def test_a_tie_broken_upwards_is_caught(make_engine, parameters_for, monkeypatch):
    """A bonus of one part in ten million per position: no score changes visibly, but plateaus now prefer their end."""
    honest = compact_function.rank

    def upwards(emit, *arguments):
        bonus = emit.Mul(emit.Cast(count_to(emit, size(emit, "k", 2)), to=onnx.TensorProto.FLOAT), 2e-8)
        return emit.Add(honest(emit, *arguments), bonus)

    monkeypatch.setattr(compact_function, "rank", upwards)
    report = verify(make_engine(parameters_for()), steps=3)
    assert "ops" in failed_rungs(report)
    assert any("lower index wins" in failure or "higher index" in failure for failure in report.failures)


def test_swapped_keys_and_values_are_caught(make_engine, parameters_for):
    def swap(name, model):
        for node in model.graph.node:
            if node.op_type == "KvcHybridAttention":
                node.input[1], node.input[2] = node.input[2], node.input[1]

    report = verify(make_engine(parameters_for(), edit=swap), steps=4)
    assert {"logits", "dense twin"} <= failed_rungs(report)


def test_a_wrong_scale_is_caught(make_engine, parameters_for):
    """Half the logits keep every top-1 token and every choice: only the logits rung and the twin see it."""

    def halve(name, model):
        last = next(node for node in model.graph.node if node.output[0] == "logits")
        last.op_type = "Mul"
        model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "half"))
        last.input.append("half")

    report = verify(make_engine(parameters_for(), edit=halve), steps=4)
    assert {"logits", "dense twin"} <= failed_rungs(report)
    assert "tokens" not in failed_rungs(report)


def test_nan_logits_are_caught(make_engine, parameters_for):
    def poison(name, model):
        last = next(node for node in model.graph.node if node.output[0] == "logits")
        last.op_type = "Mul"
        model.graph.initializer.append(numpy_helper.from_array(np.array(np.nan, np.float32), "nothing"))
        last.input.append("nothing")

    report = verify(make_engine(parameters_for(), edit=poison), steps=2)
    assert {"logits", "tokens"} <= failed_rungs(report)
    assert any("the engine's logits are not finite" in failure for failure in report.failures)
    json.dumps(report.to_json(), allow_nan=False)


def test_single_levels_run_one_rung_and_the_controls(make_engine, parameters_for):
    report = verify(make_engine(parameters_for()), level="ops", steps=2)
    assert [r.name for r in report.rungs] == ["ops", "dense twin", "activity"]
    assert report.left_out == []


def test_retrieval_alone_on_an_engine_without_the_task_does_not_pass(make_engine, parameters_for):
    """Nothing was checked, which is not a pass."""
    assert not verify(make_engine(parameters_for()), level="retrieval").passed


@pytest.mark.parametrize("wrong", [{"level": "deep"}, {"steps": 0}, {"steps": 1000}, {"samples": -1}])
def test_invalid_levels_steps_and_samples_are_refused(wrong, make_engine, parameters_for):
    with pytest.raises(InputError):
        verify(make_engine(parameters_for()), **wrong)


def test_the_report_prints_and_stores(make_engine, parameters_for):
    report = verify(make_engine(parameters_for()), steps=3)
    stored = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert stored["passed"] is True
    assert stored["thresholds"]["value_error"] == 1e-5
    assert set(stored["error"]) == {"engine", "compression", "quantisation", "notes"}
    assert stored["near_ties"]["lists_compared"] > 0
    assert stored["memory"]["engine"] > 1 << 20
    text = report.as_text()
    assert "The two halves of an engine's error" in text
    assert "near-ties: " in text
    assert text.splitlines()[-1].startswith("PASSED in ")
    table = text.splitlines()[1 : 2 + sum(len(r.checks) for r in report.rungs)]
    assert max(map(len, table)) <= 160
