"""Under `full`, our decoder's logits are transformers' logits: every family, token by token, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml

from kvc_trt.models.config import longest_compressible
from kvc_trt.models.presets import build_configs_directory, load_preset
from tests.dense_presets import dense_presets

FAMILIES = ("llama", "llama-tied-biased", "llama3.1", "longchat", "mistral", "mistral-v0.1", "qwen2", "qwen3")
CHANGED = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_ids": (2,), "dtype": "float32"}


def every_logit(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits at every position of one unpadded sequence [n] -> [n,vocab]."""
    with torch.inference_mode():
        return model(ids[None]).logits[0]


def check(
    pair: Any, model: Any, teacher_forced: Any, lengths: list[int], steps: int, dtype: torch.dtype, bar: float
) -> None:
    """Rows of unequal length in one batch, each against transformers' answer for that row alone."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, pair.config.vocab_size, (len(lengths), max(lengths) + steps), generator=generator)
    decoder = pair.decoder("full", 16, max(lengths), steps, dtype)
    following = torch.stack([row[n : n + steps] for row, n in zip(ids, lengths, strict=True)])
    found, cache = teacher_forced(decoder, ids[:, : max(lengths)], torch.tensor(lengths), following)
    for b, n in enumerate(lengths):
        expected = every_logit(model, ids[b, : n + steps])[n - 1 :]
        torch.testing.assert_close(torch.stack([logits[b] for logits in found]), expected, rtol=bar, atol=bar)
    assert cache.positions.tolist() == [n + steps for n in lengths]
    assert {tuple(layer.lengths.tolist()) for layer in cache.caches} == {tuple(n + steps for n in lengths)}


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_logits_equal_transformers_to_rounding(
    name: str, family: Callable[..., Any], teacher_forced: Any
) -> None:
    pair = family(name)
    check(pair, pair.hugging_face, teacher_forced, [1, 37, 90], 5, torch.float32, 3e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_float64_logits_equal_transformers_to_rounding(
    name: str, family: Callable[..., Any], teacher_forced: Any, exact: Any
) -> None:
    pair = family(name)
    check(pair, exact(pair), teacher_forced, [300, 2], 4, torch.float64, 1e-10)


@pytest.mark.parametrize("name", ["llama3.1", "longchat"])
def test_logits_beyond_the_original_context_equal_transformers(
    name: str, family: Callable[..., Any], teacher_forced: Any
) -> None:
    pair = family(name, max_position_embeddings=1024)
    check(pair, pair.hugging_face, teacher_forced, [600, 700], 3, torch.float32, 5e-5)


def test_the_scaled_rotation_matters_at_these_lengths(family: Callable[..., Any]) -> None:
    scaled, plain = family("llama3.1"), family("llama", rope_theta=500000.0)
    ids = torch.arange(60) % scaled.config.vocab_size
    difference = every_logit(scaled.hugging_face, ids)[-1] - every_logit(plain.hugging_face, ids)[-1]
    assert difference.abs().max() > 1e-2


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", dense_presets())
def test_logits_at_the_true_shape_of_a_preset_equal_transformers(
    name: str, true_size: Callable[..., Any], teacher_forced: Any
) -> None:
    """Everything as in the preset but one or two layers and a small vocabulary; the answer continues far from the
    prompt, at positions beyond the original context of a rescaled rotation (within the window of Mistral v0.1).

    Families with experts or sliding layers are compared at small sizes, in tests/oracles/test_families.py.
    """
    path = build_configs_directory() / "models" / f"{name}.yaml"
    mapping = yaml.safe_load(path.read_text())["architecture"]
    layers = 1 if mapping["hidden_size"] > 4096 else 2  # two of the largest take 8 GiB
    small = {"num_hidden_layers": layers, "vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2}
    pair = true_size({**mapping, **small, "torch_dtype": "float32"})
    preset = replace(load_preset(name).config, **{**CHANGED, "num_hidden_layers": layers})
    assert preset == replace(pair.config, **CHANGED)

    far = min(20_000, longest_compressible(pair.config) - 3)
    ids = torch.randint(0, 1000, (16,), generator=torch.Generator().manual_seed(3))
    decoder = pair.decoder("full", 16, far, 3)
    first, cache = decoder.prefill(ids[None, :13], torch.tensor([13]))
    cache.positions = torch.tensor([far])
    found = torch.cat([first, *(decoder.decode(token[None], cache) for token in ids[13:])])
    positions = torch.cat([torch.arange(13), torch.arange(far, far + 3)])[None]
    with torch.inference_mode():
        answer = pair.hugging_face(
            ids[None], position_ids=positions, attention_mask=torch.ones(1, 16, dtype=torch.int64)
        )
    torch.testing.assert_close(found, answer.logits[0, 12:], rtol=2e-4, atol=2e-4)
