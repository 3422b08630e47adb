"""An engine and the reference along the same tokens, and the properties that every cache of the two must share."""

from __future__ import annotations

import numpy as np
import torch

from kvc_trt.graph.state import cache_sites
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.methods.base.registry import method
from kvc_trt.reference.model.decoder import ReferenceDecoder

STEPS = 4


def roll(engine, prompts, steps=STEPS, seed=1):
    """Prefill and feed the same random tokens to every engine; yields (logits, index lists) of each run."""
    result = engine.prefill(prompts)
    yield result
    positions = np.array([len(prompt) for prompt in prompts])
    tokens = np.random.default_rng(seed).integers(2, 97, (steps, len(prompts)))
    lengths = result["cache_lengths"]
    for step in range(steps):
        result = engine.decode(tokens[step], positions + step, lengths + step, result)
        yield result


def reference_roll(engine, prompts, steps=STEPS, seed=1):
    decoder = ReferenceDecoder(
        engine.model, EngineWeights(engine.directory / "weights.safetensors"),
        method=method(engine.parameters), parameters=engine.parameters,
    )  # fmt: skip
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.from_numpy(prompt)
    logits, cache = decoder.prefill(padded, lengths)
    yield logits, cache
    for tokens in np.random.default_rng(seed).integers(2, 97, (steps, len(prompts))):
        yield decoder.decode(torch.from_numpy(tokens), cache), cache


def check_layers(engine, result, cache, step):
    for index, (site, layer) in enumerate(zip(cache_sites(engine.model, engine.parameters), cache.caches, strict=True)):
        if step == 0 and f"indices.{site.name}" in result:
            kept = layer.indices.numpy()
            found = result[f"indices.{site.name}"]
            np.testing.assert_array_equal(found[:, :, : kept.shape[2]], kept)
            assert (found[:, :, kept.shape[2] :] == -1).all()
        if step and f"selected.{site.name}" in result:
            np.testing.assert_array_equal(result[f"selected.{site.name}"], layer.selected.numpy())
        if step == 0:
            np.testing.assert_array_equal(result["cache_lengths"][index], layer.lengths.numpy())
        np.testing.assert_allclose(result[f"k_cache.{site.name}"], layer.keys.numpy(), atol=1e-4)
