"""The comparison's short cut against kvpress as it is used: one prefill for all presses, and a prefill under each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.accuracy.kvpress import answers as bench
from benchmarks.accuracy.kvpress import presses
from benchmarks.accuracy.kvpress.onednn_products import use_onednn
from benchmarks.accuracy.kvpress.rows import ALONE, Rows
from tests.oracles.presses import import_presses, read

import_presses()
attention_patch = import_module("kvpress.attention_patch").attention_patch
"""kvpress puts it before every attention when it is imported whole."""

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


def scored(model: Any, ids: torch.Tensor) -> tuple[presses.Compressor, Any]:
    """Return the presses after a prefill of the prompt, and its whole cache."""
    compressor = presses.Compressor(model)
    with compressor.scoring():
        cache = whole_cache(model, ids)
    return compressor, [(layer.keys, layer.values) for layer in cache.layers]


def test_every_press_keeps_what_it_keeps_alone(press: Callable[[str], Any], model: Any, ids: torch.Tensor) -> None:
    compressor, full = scored(model, ids)
    for amount in AMOUNTS:
        rows = compressor.scorers(full, amount, room=3)
        assert (rows.kept, rows.names) == (amount, tuple((name, amount) for name in presses.SCORERS))
        for row, name in enumerate(presses.SCORERS):
            alone = press(presses.SCORERS[name])()
            alone.compression_ratio = presses.ratio_for(amount, LENGTH)
            expected = read(alone, model, ids)
            assert len(rows.layers) == len(expected.layers)
            for (keys, values), layer in zip(rows.layers, expected.layers, strict=True):
                assert layer.keys.shape[2] == amount == keys.shape[2] - 3
                torch.testing.assert_close(keys[row : row + 1, :, :amount], layer.keys, rtol=0, atol=0)
                torch.testing.assert_close(values[row : row + 1, :, :amount], layer.values, rtol=0, atol=0)
    for (keys, _), untouched in zip(full, whole_cache(model, ids).layers, strict=True):
        assert torch.equal(keys, untouched.keys)


def test_adakv_masks_what_it_masks_alone(press: Callable[[str], Any], model: Any, ids: torch.Tensor) -> None:
    compressor, full = scored(model, ids)
    for amount in MASKED:
        rows = compressor.masked(full, amount, room=3)
        assert rows.masks is not None
        alone = press("AdaKVPress")(press("SnapKVPress")())
        alone.compression_ratio = presses.ratio_for(amount, LENGTH)
        read(alone, model, ids)
        for layer, recorded in zip(model.model.layers, rows.masks, strict=True):
            for ours, theirs in zip(recorded, layer.self_attn.masked_key_indices, strict=True):
                assert torch.equal(ours, theirs)
            layer.self_attn.masked_key_indices = None


def asked_of(ids: torch.Tensor, task: str, **question: Any) -> bench.Asked:
    """Return a question with a prompt of these token ids, of at most four tokens' answer."""
    whole = {"prompt": ids.tolist(), "late": [3, 1], "target": [], "answers": [], **question}
    return bench.Asked({"task": task, "questions": [whole], "max_new_tokens": 4}, 0, None, frozenset())


def test_rows_of_several_lengths_score_as_they_would_alone(model: Any, ids: torch.Tensor) -> None:
    """Likelihoods of the whole cache, twice, and of a reversed and a shorter one: the first's equals a plain pass."""
    asked = asked_of(ids, "log-summary", target=[5, 9, 2])
    full = [(layer.keys, layer.values) for layer in whole_cache(model, ids).layers]
    turned = [(torch.cat([keys, keys.flip(2)]), torch.cat([values, values])) for keys, values in full]
    short = [(keys[:, :, 40:], values[:, :, 40:]) for keys, values in full]

    def groups() -> list[Rows]:
        return [rows_of(turned), rows_of(short), rows_of(full)]

    with torch.inference_mode():
        first = torch.zeros(1, model.config.vocab_size)
        found = bench.decoded(model, asked, first, groups())
        alone = [score for group in groups() for score in bench.decoded(model, asked, first, [group])]
        text = torch.tensor([[*ids.tolist(), 3, 1, 5, 9, 2]])
        chances = torch.log_softmax(model(text).logits[0, LENGTH + 1 : -1].double(), -1)
    expected = -chances.gather(1, torch.tensor([[5], [9], [2]])).mean().item()
    assert found == pytest.approx(alone, abs=1e-5)
    assert [found[0], found[3]] == pytest.approx([expected, expected], abs=1e-4)
    assert min(abs(found[1] - expected), abs(found[2] - expected)) > 1e-3


@pytest.mark.usefixtures("press")
def test_masked_rows_answer_beside_others_as_they_would_alone(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdaKV overwrites keys at every step, of its own row alone; the whole cache's row is as a plain pass has it."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, ALONE, attention_patch(ALL_ATTENTION_FUNCTIONS[ALONE]))
    compressor, full = scored(model, ids)

    def logits_of(groups: list[Rows]) -> list[torch.Tensor]:
        decoding = bench.Decoding(model, groups, LENGTH)
        steps = [decoding.logits(decoding.feed([[token]] * decoding.rows)[:, -1]) for token in (7, 4, 11)]
        return list(torch.stack(steps, 1))

    with torch.inference_mode():
        masked = [compressor.masked(full, amount, room=3) for amount in MASKED]
        found = logits_of([presses.whole_rows(("full", LENGTH), full, 3), *masked, compressor.scorers(full, 70, 3)])
        alone = [logits_of([compressor.masked(full, amount, room=3)])[0] for amount in MASKED]
        plain = model(torch.tensor([[*ids.tolist(), 7, 4, 11]])).logits[0, LENGTH:]
    torch.testing.assert_close(found[0], plain, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found[1:3], alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert (ours - found[0]).abs().max() > 1e-4
    assert model.config._attn_implementation == "sdpa"


def rows_of(layers: Any) -> Rows:
    """Caches with room for a question and an answer."""
    rows = Rows.empty(range(len(layers[0][0])), layers[0][0].shape[2], 8, layers)
    for index, (keys, values) in enumerate(layers):
        for row in range(len(keys)):
            rows.fill(row, index, keys[row : row + 1], values[row : row + 1])
    return rows


def test_onednns_products_are_pytorchs() -> None:
    embedding, linear = torch.nn.Embedding(40, 24), torch.nn.Linear(24, 40)
    linear.weight = embedding.weight
    model = torch.nn.Sequential(embedding, torch.nn.Linear(24, 24, bias=False), linear)
    ids = torch.tensor([[3, 1, 39]])
    with torch.inference_mode():
        expected = model(ids)
        use_onednn(model)
        torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    assert (embedding.weight.numel(), model[1].weight.numel()) == (24 * 40, 0)
