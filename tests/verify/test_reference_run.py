"""The layer-major reference is the reference; a replay judges every choice it grants."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvc_trt import policies
from kvc_trt.reference.decoder import ReferenceDecoder
from kvc_trt.verify.attention import attend_selected
from kvc_trt.verify.granted import grant
from kvc_trt.verify.prompts import batch_of, prompt_lengths, random_prompts
from kvc_trt.verify.reference_run import ReferenceRun, different_rows, reference_run, replay

STEPS = 3


@pytest.fixture(params=["rocketkv"])
def forced(request, make_engine, parameters_for):
    changes = {"window": 16, "pool_kernel": 7, "token_budget": 96} if request.param == "snapkv" else {}
    engine = make_engine(parameters_for(request.param, **changes))
    batch = batch_of(random_prompts(engine.model, [200, 91, 5], seed=3))
    tokens = np.random.default_rng(1).integers(engine.model.vocab_size, size=(STEPS, len(batch)))
    return engine, batch, tokens


def arguments(engine, batch, tokens):
    return engine.model, engine.weights(), engine.parameters, batch, tokens


def test_it_equals_prefill_and_decode(forced):
    engine, batch, tokens = forced
    run = reference_run(*arguments(*forced))
    parameters = engine.parameters
    decoder = ReferenceDecoder(
        engine.model, engine.weights(), method=policies.method(parameters), parameters=parameters
    )
    logits, cache = decoder.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    expected = [logits] + [decoder.decode(torch.from_numpy(fed), cache) for fed in tokens]
    np.testing.assert_allclose(run.logits, torch.stack(expected).numpy(), atol=1e-5)
    last = cache.caches[1].selected
    assert np.array_equal(run.choices[1][-1], last.numpy())


@pytest.mark.parametrize("forced", ["rocketkv", "snapkv"], indirect=True)
def test_replaying_its_own_choices_changes_nothing(forced):
    """Of KV heads, and of query heads that keep tokens for themselves."""
    run = reference_run(*arguments(*forced))
    again = replay(*arguments(*forced), run.choices, slack=1.0)
    np.testing.assert_allclose(again.logits, run.logits, atol=1e-5)
    assert (again.explained.near_ties, again.explained.wrong) == (0, ())
    assert different_rows(run.choices, again.choices) == set()


def test_a_replay_refuses_what_rounding_cannot_explain(forced):
    run = reference_run(*arguments(*forced))
    chosen = {layer: [choice.copy() for choice in choices] for layer, choices in run.choices.items()}
    kept = chosen[0][0][0, 0]
    dropped = np.setdiff1d(np.arange(150), kept)[0]
    chosen[0][0][0, 0] = np.sort(np.append(kept[1:], dropped))
    again = replay(*arguments(*forced), chosen, slack=32.0)
    assert len(again.explained.wrong) >= 1
    assert different_rows(run.choices, chosen) == {0}
    counted = replay(*arguments(*forced), chosen, slack=None)
    assert (counted.explained.near_ties >= 1, counted.explained.wrong) == (True, ())


def test_nothing_is_granted_where_each_prompt_has_budgets_of_its_own(parameters_for):
    rule = parameters_for(token_budget=40, layer_budget="squeeze-online")
    ours = ReferenceRun(np.zeros((1, 1, 97), np.float32), {0: [np.zeros((1, 1, 2))]})
    subject = SimpleNamespace(
        sites=[SimpleNamespace(parameters=rule)],
        reference_run=ours,
        observed=SimpleNamespace(choices={0: [np.ones((1, 1, 2))]}),
        choosing_caches=lambda: {0},
    )
    assert grant(subject).rows == ()


def test_attention_over_all_tokens_is_dense_attention():
    rng = np.random.default_rng(0)
    query = torch.from_numpy(rng.standard_normal((1, 4, 8)))
    keys, values = (torch.from_numpy(rng.standard_normal((1, 2, 5, 8))) for _ in range(2))
    everything = torch.arange(5).expand(1, 2, 5)
    found = attend_selected(query, keys, values, everything)
    weights = torch.softmax(query.reshape(1, 2, 2, 8) @ keys.transpose(2, 3) / 8**0.5, -1)
    torch.testing.assert_close(found, (weights @ values).reshape(1, 4, 8))
    padded = torch.tensor([[[0, 2, -1], [1, -1, -1]]])
    only = attend_selected(query, keys, values, padded)
    torch.testing.assert_close(only[0, 2:], values[0, 1, 1].expand(2, 8))


def test_prompt_lengths_reach_every_regime(parameters_for):
    parameters = parameters_for()
    lengths = prompt_lengths(parameters, 1024)
    assert lengths == sorted({256, parameters.prompt_budget + 1, 32, 8}, reverse=True)
