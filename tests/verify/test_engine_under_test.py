"""An engine's choices are judged and forced on the reference, under every policy whose choices can be judged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.progress import NullProgress
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.plan import make_plan
from kvc_trt.verify.reference_run import StepInputs
from kvc_trt.verify.thresholds import thresholds_for


@pytest.fixture
def tested(request, make_engine, parameters_for):
    engine = make_engine(parameters_for(request.param))
    plan = make_plan("logits", engine.model, engine.parameters, steps=3)
    return EngineUnderTest(
        engine, harness_for(engine, RunOptions("onnxruntime", 1)), plan, thresholds_for("fp32"), NullProgress()
    )


SELECTING = pytest.mark.parametrize(
    "tested", ["rocketkv", "hybrid", "sparq", "quest", "expected-attention-hybrid"], indirect=True
)


@SELECTING
def test_lists_read_are_forced_on_the_reference_and_wrong_ones_found(tested):
    assert tested.forced_choices.rows == ()
    read = {cache: [lists.copy() for lists in steps] for cache, steps in tested.observed.read.items()}
    cache = max(read)
    given = read[cache][1][0, 0]
    taken = given[given >= 0]
    unread = np.setdiff1d(np.arange(tested.observed.lengths[1][cache, 0]), taken)
    given[: taken.size] = np.sort([*taken[1:], unread[0]])
    forced = tested.forced(read, tested.observed.inputs)
    assert forced.rows == (0,)
    assert len(forced.explained.wrong) >= 1
    assert forced.explained.wrong[0].startswith(f"cache {cache}, step 2: row 0, KV head 0: ")
    assert not np.array_equal(forced.logits[:, 0], tested.reference_run.logits[:, 0])
    assert forced.inputs_off < 1e-5


@SELECTING
def test_lists_read_are_judged_on_the_scores_they_were_chosen_by(tested):
    """Inputs that are off by a tenth choose otherwise, rightly; by inputs that are the reference's it is wrong."""
    inputs, read = {}, {}
    for cache, steps in tested.observed.inputs.items():
        rule, rng = tested.sites[cache].parameters, np.random.default_rng(cache)
        inputs[cache], read[cache] = [], []
        for step, (query, keys) in enumerate(steps):
            moved = [(x * (1 + 0.1 * rng.standard_normal(x.shape))).astype(np.float32) for x in (query, keys)]
            lengths = torch.from_numpy(tested.observed.lengths[step][cache])
            k = torch.from_numpy(moved[1])
            seen = rule.selection.layer_cache(k, k, lengths, rule)
            read[cache].append(rule.selection.select(torch.from_numpy(moved[0]), seen, rule).selected.numpy())
            inputs[cache].append(StepInputs(*moved))
    forced = tested.forced(read, inputs)
    assert forced.explained.near_ties >= 3
    assert forced.explained.wrong == ()
    assert 0.05 < forced.inputs_off < 0.5
    assert len(tested.forced(read, tested.observed.inputs).explained.wrong) >= 3
    assert len(tested.forced(read, {}).explained.wrong) >= 3


@SELECTING
def test_no_choice_is_forced_where_read_tokens_are_hidden(tested):
    read = dict(tested.observed.read)
    del read[max(read)]
    assert tested.forced(read, tested.observed.inputs).explained is None


@pytest.mark.parametrize("tested", ["rocketkv"], indirect=True)
def test_no_choice_is_forced_where_kept_tokens_are_hidden(tested):
    assert tested.forced_choices.rows == ()
    del tested.observed.kept[0]
    assert tested._choices(tested.reference_run, tested.observed.kept, tested.observed.read) is None


class TestCachesInAFormat:
    """The reference goes on from the codes of the observed run."""

    @pytest.fixture
    def stored(self, make_engine, parameters_for):
        engine = make_engine(parameters_for("rocketkv", kv_cache="int4"))
        plan = make_plan("logits", engine.model, engine.parameters, steps=3)
        target = harness_for(engine, RunOptions("onnxruntime", 1))
        return EngineUnderTest(engine, target, plan, thresholds_for("fp32"), NullProgress())

    def test_a_run_that_rounds_as_observed_is_judged_itself(self, stored):
        assert stored.judged_run is stored.engine_run
        assert stored.findings == []

    def test_the_observed_run_is_judged_in_place_of_one_that_rounds_otherwise(self, stored):
        stored.engine_run.logits[1, 0, 0] += 1e-6
        assert stored.judged_run is stored.observed.run
        assert "the observed run is judged" in stored.findings[0]

    def test_a_code_that_is_not_the_engines_own_moves_the_reference(self, stored):
        """The reference reads what the engine stored, though its own key is another."""
        before = stored.reference_run.logits.copy()
        table, _ = stored.observed.tokens.tables[1]
        table.parts[0][0] ^= 0x11
        del stored.__dict__["reference_run"]
        after = stored.reference_run.logits
        assert np.abs(after - before)[1:, 0].max() > 1e-3
        np.testing.assert_array_equal(after[0], before[0])  # a prompt's own attention reads exact keys
        np.testing.assert_array_equal(after[:, 1:], before[:, 1:])
