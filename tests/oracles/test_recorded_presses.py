"""The comparison's short cut against kvpress as it is used: one prefill for all presses, and a prefill under each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks import accuracy_kvpress as bench
from tests.oracles.presses import import_presses, read

import_presses()

FILES = {
    "SnapKVPress": "snapkv_press",
    "StreamingLLMPress": "streaming_llm_press",
    "ExpectedAttentionPress": "expected_attention_press",
    "KnormPress": "knorm_press",
    "TOVAPress": "tova_press",
    "AdaKVPress": "adakv_press",
}
LENGTH, AMOUNTS, MASKED = 170, (150, 70, 100), (70, 100)


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A press by its class's name, as the package has it."""
    classes = {name: getattr(import_module(f"kvpress.presses.{file}"), name) for name, file in FILES.items()}
    for name, found in classes.items():
        monkeypatch.setattr(sys.modules["kvpress"], name, found, raising=False)
    return lambda name: classes[name]


@pytest.fixture(params=["llama", "llama3.1"])
def model(request: pytest.FixtureRequest, family: Callable[..., Any]) -> Any:
    found = family(request.param).hugging_face
    found.config._attn_implementation = "sdpa"  # AdaKV refuses another
    return found


@pytest.fixture
def ids(model: Any) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(5))


def whole_cache(model: Any, ids: torch.Tensor) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        model(ids[None], past_key_values=cache)
    return cache


def test_every_press_keeps_what_it_keeps_alone(press: Callable[[str], Any], model: Any, ids: torch.Tensor) -> None:
    with bench.recording(model, AMOUNTS, MASKED) as found:
        cache = whole_cache(model, ids)
    assert set(found.layers) == {(name, amount) for name in bench.SCORERS for amount in AMOUNTS}
    for (name, amount), layers in found.layers.items():
        alone = press(bench.SCORERS[name])()
        alone.compression_ratio = bench.ratio_for(amount, LENGTH)
        expected = read(alone, model, ids)
        assert len(layers) == len(expected.layers)
        for (keys, values), layer in zip(layers, expected.layers, strict=True):
            assert keys.shape[2] == amount
            torch.testing.assert_close(keys, layer.keys, rtol=0, atol=0)
            torch.testing.assert_close(values, layer.values, rtol=0, atol=0)
    for layer, untouched in zip(cache.layers, whole_cache(model, ids).layers, strict=True):
        assert torch.equal(layer.keys, untouched.keys)


def test_adakv_masks_what_it_masks_alone(press: Callable[[str], Any], model: Any, ids: torch.Tensor) -> None:
    with bench.recording(model, AMOUNTS, MASKED) as found:
        whole_cache(model, ids)
    assert set(found.masks) == set(MASKED)
    for amount, masks in found.masks.items():
        alone = press("AdaKVPress")(press("SnapKVPress")())
        alone.compression_ratio = bench.ratio_for(amount, LENGTH)
        read(alone, model, ids)
        for layer, recorded in zip(model.model.layers, masks, strict=True):
            for ours, theirs in zip(recorded, layer.self_attn.masked_key_indices, strict=True):
                assert torch.equal(ours, theirs)
            layer.self_attn.masked_key_indices = None


def test_a_row_of_a_batch_scores_as_it_would_alone(model: Any, ids: torch.Tensor) -> None:
    """Likelihoods of three rows, one of which is the whole cache: that one's equals a plain pass over the text."""
    question = {"prompt": ids.tolist(), "late": [3, 1], "target": [5, 9, 2], "answers": []}
    group = {"task": "log-summary", "questions": [question], "max_new_tokens": 3}
    cache, asked = whole_cache(model, ids), bench.Asked(group, 0, None, frozenset())
    layers = [
        (torch.cat([layer.keys, layer.keys.flip(2), layer.keys]), torch.cat([layer.values, layer.values, layer.values]))
        for layer in cache.layers
    ]
    found = bench.decoded(model, asked, torch.zeros(1, model.config.vocab_size), layers)
    text = torch.tensor([[*ids.tolist(), 3, 1, 5, 9, 2]])
    with torch.inference_mode():
        chances = torch.log_softmax(model(text).logits[0, LENGTH + 1 : -1].double(), -1)
    expected = -chances.gather(1, torch.tensor([[5], [9], [2]])).mean().item()
    assert found == pytest.approx([expected, found[1], expected], abs=1e-4)
    assert abs(found[1] - expected) > 1e-3
