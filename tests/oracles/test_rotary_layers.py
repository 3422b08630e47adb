"""Policies that rotate by themselves, in layers without rotation and in heads of which a part rotates."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvc_trt import Engine, build, policies
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.openvino.executor import OpenVinoExecutor
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.methods.base.registry import method
from kvc_trt.models.config import Attention, ModelDescription
from kvc_trt.models.formats import open_checkpoint, weights_of
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import run
from tests.backends.prompts import prompts
from tests.every_policy import parameters_of
from tests.oracles.family_models import SHAPE, written
from tests.rounding import assert_close
from tests.small_model import SMALL

KINDS = {
    "smollm3": "halves, and a layer without rotation",
    "command-r7b": "neighbours, and a layer without rotation",
    "phi4-mini": "halves of a part",
    "gpt-neox": "halves of a part",
    "glm": "neighbours of a part",
}
"""Models of which every way to rotate channels is one."""
LENGTH, BUDGET, SINKS, AHEAD, STEPS = 90, 24, 4, 512, 6
PROMPT = torch.randint(3, SHAPE["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(5))


def reference(path: Path, policy: str, **settings: Any) -> ReferenceDecoder:
    checkpoint = open_checkpoint(path)
    limits: dict[str, Any] = {"max_input_len": LENGTH, "max_output_len": STEPS}
    parameters = policies.resolve(policy, model=checkpoint.config, **limits, **settings)
    weights = weights_of(checkpoint)
    return ReferenceDecoder(checkpoint.config, weights, method=policies.method(parameters), parameters=parameters)


class Seen:
    """Tensors that the attention of transformers' model reads for one prompt, layer by layer."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module = sys.modules[type(model).__module__]
        rotate, attend = module.apply_rotary_pos_emb, module.eager_attention_forward
        self.plain: list[Tensor] = []
        """[H,S,D]: the queries before their rotation."""
        self.turned: list[Tensor | None] = []
        """[D,D]: the mean rotation of the positions to come; None in a layer that does not rotate."""
        self.attended: list[tuple[Tensor, Tensor, float]] = []
        """Keys after the rotation and values [G,S,D], and the scale."""
        given: list[Tensor] = []
        ahead = torch.arange(LENGTH, LENGTH + AHEAD)
        with torch.inference_mode():
            size = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
            angles = model.base_model.rotary_emb(torch.zeros(1, 1, size), ahead[None])
            unit = torch.eye(size)[None, :, None].expand(1, size, AHEAD, size)
            turned = rotate(unit, unit, *angles)[0][0].mean(dim=1)

        def rotated(query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Any:
            given.append(query)
            return rotate(query, key, *rest, **more)

        def attended(layer: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
            self.plain.append((given[-1] if given else query)[0])
            self.turned.append(turned if given else None)
            self.attended.append((key[0], value[0], more["scaling"]))
            given.clear()
            return attend(layer, query, key, value, *rest, **more)

        monkeypatch.setattr(module, "apply_rotary_pos_emb", rotated)
        monkeypatch.setattr(module, "eager_attention_forward", attended)
        with torch.inference_mode():
            model(PROMPT[None])

    def kept(self, layer: int) -> list[set[int]]:
        """Return the tokens of each KV head that the queries to come are expected to attend to, and the sinks."""
        keys, values, scale = self.attended[layer]
        plain, turned = self.plain[layer].double(), self.turned[layer]
        group, found = len(plain) // len(keys), []
        rotation = torch.eye(plain.shape[2]).double() if turned is None else turned.double()
        for head, (key, value) in enumerate(zip(keys.double()[:, SINKS:], values.double()[:, SINKS:], strict=True)):
            shares = []
            for query in plain[head * group : (head + 1) * group, SINKS:]:
                future = query @ rotation
                mean, covariance = future.mean(dim=0), torch.cov(future.T, correction=0)
                exponent = scale * key @ mean + scale**2 / 2 * ((key @ covariance) * key).sum(dim=1)
                shares.append(exponent.softmax(dim=0))
            score = torch.stack(shares).mean(dim=0) * value.norm(dim=1)
            found.append({*range(SINKS), *(SINKS + score.topk(BUDGET - STEPS - SINKS).indices).tolist()})
        return found


@pytest.mark.parametrize("name", KINDS)
def test_expected_attention_keeps_what_the_rotation_of_transformers_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(written(name, tmp_path), monkeypatch)
    decoder = reference(tmp_path, "expected-attention", token_budget=BUDGET)
    _, cache = decoder.prefill(PROMPT[None], torch.tensor([LENGTH]))
    assert (None in seen.turned) == ("without" in KINDS[name])
    for layer, one in enumerate(cache.caches):
        assert one.indices is not None
        assert [set(kept) for kept in one.indices[0].tolist()] == seen.kept(layer)


@pytest.mark.parametrize("name", KINDS)
def test_positions_of_a_cache_that_evicts_nothing_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = written(name, tmp_path)
    decoder = reference(tmp_path, "streaming-llm", token_budget=LENGTH + STEPS, positions="cache")
    found, cache = decoder.prefill(PROMPT[None], torch.tensor([LENGTH]))
    logits, tokens = [found], PROMPT
    for _ in range(STEPS):
        tokens = torch.cat([tokens, logits[-1].argmax(dim=-1)])
        logits.append(decoder.decode(tokens[-1:], cache))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0, LENGTH - 1 :]
    torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-4, atol=1e-4)


def test_positions_are_nothing_to_a_model_without_rotation(tmp_path: Path) -> None:
    written("command-r7b-without-rotation", tmp_path)
    found = []
    for positions in ("original", "cache"):
        decoder = reference(tmp_path, "streaming-llm", token_budget=BUDGET, positions=positions)
        logits, cache = decoder.prefill(PROMPT[None], torch.tensor([LENGTH]))
        found.append([logits, *(decoder.decode(PROMPT[step : step + 1], cache) for step in range(STEPS))])
    for ranked, original in zip(*found, strict=True):
        torch.testing.assert_close(ranked, original)


KINDS_OF_LAYERS = Attention(), Attention(rotary=False)
MIXED = replace(SMALL, description=ModelDescription(attention=KINDS_OF_LAYERS, rotary_channels=SMALL.head_size // 2))
"""One layer in two rotates, and half of each head of it."""
ROTATING = (
    "expected-attention",
    "expected-attention-hybrid",
    "streaming-llm, positions of the cache",
    "streaming-llm, positions of the cache and budgets from the prompt",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROTATING)
def test_executors_rotate_as_the_reference_does(name: str, make_program: Any) -> None:
    parameters = parameters_of(name, MIXED)
    decoder = ReferenceDecoder(MIXED, RandomWeights(MIXED, 0), method=method(parameters), parameters=parameters)
    batch = batch_of(prompts())
    logits, cache = decoder.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    expected, tokens = [logits], []
    for _ in range(STEPS):
        tokens.append(expected[-1].argmax(dim=-1))
        expected.append(decoder.decode(tokens[-1], cache))
    program = make_program(name, model=MIXED)
    by_row = parameters.division is not None  # not taken by the others
    for executor in (OnnxRuntimeExecutor, *(() if by_row else (OpenVinoExecutor, TorchExecutor))):
        found = run(executor(program), batch, STEPS, tokens=torch.stack(tokens).numpy())
        assert_close(found.logits, np.stack([one.numpy() for one in expected[: len(found.logits)]]))


SETTINGS: dict[str, dict[str, Any]] = {
    "expected-attention": {"draft_tokens": 2},
    "streaming-llm": {"positions": "cache"},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", SETTINGS)
def test_engines_with_layers_that_do_not_rotate_pass_verification(policy: str, tmp_path: Path) -> None:
    """Turns and drafts of the first are part of it; the second has neither."""
    written("smollm3", tmp_path / "checkpoint")
    limits: dict[str, Any] = {"token_budget": 64, "max_input_len": 256, "max_output_len": 32, "verify": False}
    build(str(tmp_path / "checkpoint"), policy=policy, output=tmp_path / "engine", **limits, **SETTINGS[policy])
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        report = engine.verify(level="quick", steps=4, samples=2)
    assert report.passed, report.failures
