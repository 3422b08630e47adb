"""Whole engines whose caches have a format: prompts, steps and turns beside the reference decoder.

A step's own keys and values are rounded differently by the two sides, so now and then a code beside an edge differs by
one; its effect is far below what the format itself changes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvc_trt.graph.weights import EngineWeights
from kvc_trt.methods.base.registry import method
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.every_format import in_formats
from tests.every_policy import CASES, TAKING_TURNS, parameters_of
from tests.graph.rolling import reference_roll, roll
from tests.graph.small_models import make_small_engine, prompts_of
from tests.small_model import SMALL

pytestmark = pytest.mark.slow
SHARE = 0.1
"""Allowed difference between the two sides, as a share of the format's own change to logits."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "form"), in_formats(CASES))
def test_steps_equal_the_reference(name, form, tmp_path):
    parameters = replace(parameters_of(name), kv_cache=form)
    engine, prompts = make_small_engine(tmp_path, parameters, model=SMALL), prompts_of(200, 61)
    exact = replace(engine, parameters=replace(parameters, kv_cache=AUTO))
    runs = zip(roll(engine, prompts), reference_roll(engine, prompts), reference_roll(exact, prompts), strict=True)
    for step, (found, (expected, cache), (unstored, _)) in enumerate(runs):
        limit = 1e-5 if step == 0 else SHARE * (expected - unstored).abs().max().item()
        np.testing.assert_allclose(found["logits"], expected.numpy(), rtol=0, atol=limit)
        for index, layer in enumerate(cache.caches):
            if step and f"selected.{index}" in found and layer.selected is not None:
                np.testing.assert_array_equal(found[f"selected.{index}"], layer.selected.numpy())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "form"), in_formats(TAKING_TURNS))
def test_a_turn_equals_the_reference(name, form, tmp_path):
    parameters = replace(parameters_of(name, max_conversation_len=300), kv_cache=form)
    engine = make_small_engine(tmp_path, parameters, model=SMALL, turns=True)
    prompts, block = prompts_of(200, 61), prompts_of(9, 9, seed=1)
    positions = np.array([200, 61])
    before = engine.prefill(prompts)
    turned = engine.extend(block, positions, before["cache_lengths"], before)
    last = engine.decode(np.array([5, 7]), positions + 9, turned["cache_lengths"], turned)
    expected, exact = (after_turn(engine, replace(parameters, kv_cache=one), prompts, block) for one in (form, AUTO))
    for found, wanted, unstored in zip((turned, last), expected, exact, strict=True):
        limit = SHARE * (wanted - unstored).abs().max().item()
        np.testing.assert_allclose(found["logits"], wanted.numpy(), rtol=0, atol=limit)


def after_turn(engine, parameters, prompts, block):
    """Return the reference's logits after a turn and after the step that follows it."""
    decoder = ReferenceDecoder(
        SMALL, EngineWeights(engine.directory / "weights.safetensors"), method=method(parameters), parameters=parameters
    )
    ids = torch.zeros(2, 200, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.from_numpy(prompt)
    _, cache = decoder.prefill(ids, torch.tensor([200, 61]))
    of_turn = decoder.extend(torch.from_numpy(np.stack(block)), torch.tensor([9, 9]), cache)
    return of_turn, decoder.decode(torch.tensor([5, 7]), cache)
