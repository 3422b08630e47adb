"""The layer-major reference is the reference; a replay judges every choice that is forced on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_trt import policies
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.questions.prompts import prompt_lengths, random_prompts
from kvc_trt.verify.reference_run import (
    Judging,
    KnownRun,
    can_judge,
    different_rows,
    force_choices,
    reference_run,
    replay,
)
from tests.rounding import assert_close

STEPS = 3


@pytest.fixture(params=["rocketkv"])
def forced(request, make_engine, parameters_for):
    engine = make_engine(parameters_for(request.param))
    batch = batch_of(random_prompts(engine.model, [200, 91, 5], seed=3))
    tokens = np.random.default_rng(1).integers(engine.model.vocab_size, size=(STEPS, len(batch)))
    return engine, batch, tokens


def known(engine, batch, tokens):
    return KnownRun(engine.model, engine.weights(), engine.parameters, batch, tokens)


def test_the_reference_run_equals_prefill_and_decode(forced):
    engine, batch, tokens = forced
    run = reference_run(known(*forced))
    parameters = engine.parameters
    decoder = ReferenceDecoder(
        engine.model, engine.weights(), method=policies.method(parameters), parameters=parameters
    )
    logits, cache = decoder.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    expected = [logits] + [decoder.decode(torch.from_numpy(fed), cache) for fed in tokens]
    assert_close(run.logits, torch.stack(expected))
    last = cache.caches[1].selected
    assert np.array_equal(run.choices[1][-1], last.numpy())


@pytest.mark.parametrize(
    "forced",
    [
        "rocketkv",
        "rocketkv, a skipped layer",
        "hybrid",
        "snapkv",
        "sparq",
        "quest",
        "keydiff",
        "expected-attention",
        "expected-attention-hybrid",
    ],
    indirect=True,
)
def test_replaying_its_own_choices_changes_nothing(forced):
    """Covers choices of KV heads, of query heads that keep or read for themselves, and layers that choose nothing."""
    run = reference_run(known(*forced))
    again = replay(known(*forced), run.choices, Judging(1.0))
    assert_close(again.logits, run.logits)
    assert (again.explained.near_ties, again.explained.wrong) == (0, ())
    assert different_rows(run.choices, again.choices) == set()


def test_a_replay_refuses_what_rounding_cannot_explain(forced):
    run = reference_run(known(*forced))
    chosen = {layer: [choice.copy() for choice in choices] for layer, choices in run.choices.items()}
    kept = chosen[0][0][0, 0]
    dropped = np.setdiff1d(np.arange(150), kept)[0]
    chosen[0][0][0, 0] = np.sort(np.append(kept[1:], dropped))
    again = replay(known(*forced), chosen, Judging(32.0))
    assert len(again.explained.wrong) >= 1
    assert different_rows(run.choices, chosen) == {0}
    counted = replay(known(*forced), chosen, Judging(None))
    assert (counted.explained.near_ties >= 1, counted.explained.wrong) == (True, ())


def test_choices_are_forced_only_where_one_budget_holds_for_all_prompts(parameters_for):
    assert can_judge([parameters_for(token_budget=40)])
    assert not can_judge([parameters_for(), parameters_for(token_budget=40, layer_budget="squeeze-online")])


def test_forced_choices_stay_with_their_layer(make_engine, parameters_for):
    """The first layer keeps everything, and has no choice that could be forced."""
    engine = make_engine(parameters_for(skip_layers=1))
    batch = batch_of(random_prompts(engine.model, [200], seed=3))
    given = known(engine, batch, np.zeros((0, 1), np.int64))
    chosen = {layer: [choice.copy() for choice in choices] for layer, choices in reference_run(given).choices.items()}
    kept = chosen[1][0][0, 0]
    chosen[1][0][0, 0] = np.sort(np.append(kept[1:], np.setdiff1d(np.arange(150), kept)[0]))
    wrong = replay(given, chosen, Judging(32.0)).explained.wrong
    assert len(wrong) == 1
    assert wrong[0].startswith("cache 1, step 0: row 0, KV head 0: ")


def test_only_rows_that_chose_otherwise_are_run_again(forced):
    own = reference_run(known(*forced))
    chosen = {layer: [choice.copy() for choice in choices] for layer, choices in own.choices.items()}
    assert force_choices(known(*forced), own, chosen, Judging(32.0)).rows == ()
    kept = chosen[0][0][0, 0]
    chosen[0][0][0, 0] = np.sort(np.append(kept[1:], np.setdiff1d(np.arange(150), kept)[0]))
    found = force_choices(known(*forced), own, chosen, Judging(None))
    assert (found.rows, found.explained.near_ties >= 1) == ((0,), True)
    assert np.array_equal(found.logits[:, 1:], own.logits[:, 1:])
    assert not np.array_equal(found.logits[:, 0], own.logits[:, 0])


def test_prompt_lengths_reach_every_regime(parameters_for):
    parameters = parameters_for()
    lengths = prompt_lengths(parameters, 1024)
    expected = [256, parameters.longest_whole + 1, parameters.token_budget, parameters.window // 2]
    assert lengths == expected == sorted(set(expected), reverse=True)
