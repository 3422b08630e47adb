"""A model whose attention has another scale keeps, reads and answers what its queries, longer by as much, would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.methods.base.registry import method
from kvc_trt.models.config import ModelDescription
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import run
from tests import small_programs
from tests.backends.prompts import prompts
from tests.every_policy import CASES, parameters_of
from tests.rounding import assert_close
from tests.small_model import SMALL

FACTOR = 4.0
"""A power of two: products with it are exact."""
SCALED = replace(SMALL, description=ModelDescription(attention_scale=FACTOR / SMALL.head_size**0.5))
STEPS = 6


class LongQueries(RandomWeights):
    """The weights of `RandomWeights`, with queries that are longer by `FACTOR`."""

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        rows = super().read_rows(name, start, stop)
        return rows * np.float32(FACTOR) if name.endswith("self_attn.q_proj.weight") else rows


def reference(model: Any, weights: RandomWeights, name: str) -> list[torch.Tensor]:
    """Logits after the prompts, and after each of `STEPS` times the token that then was best."""
    parameters = parameters_of(name, model)
    decoder = ReferenceDecoder(model, weights, method=method(parameters), parameters=parameters)
    batch = batch_of(prompts())
    logits, cache = decoder.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    found = [logits]
    for _ in range(STEPS):
        found.append(decoder.decode(found[0].argmax(dim=-1), cache))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_reference_scales_queries_exactly_under_every_policy(name: str) -> None:
    scaled, long = reference(SCALED, RandomWeights(SMALL, 0), name), reference(SMALL, LongQueries(SMALL, 0), name)
    plain = reference(SMALL, RandomWeights(SMALL, 0), name)
    for found, expected, other in zip(scaled, long, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert not torch.allclose(found, other, atol=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("long-queries")


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("executor", [OnnxRuntimeExecutor, TorchExecutor])
@pytest.mark.parametrize("name", CASES)
def test_executors_scale_queries_under_every_policy(
    name: str, executor: Any, make_program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs of the two models differ, so their products may be rounded otherwise."""
    monkeypatch.setattr(small_programs, "RandomWeights", LongQueries)
    long = small_programs.SmallPrograms(folder)(name)
    monkeypatch.undo()
    batch = batch_of(prompts())
    expected = run(executor(long), batch, STEPS)
    found = run(executor(make_program(name, model=SCALED)), batch, STEPS, tokens=expected.tokens)
    np.testing.assert_array_equal(found.cache_lengths, expected.cache_lengths)
    assert_close(found.logits, expected.logits)
