"""Every family beside transformers: logits, greedy answers, and engines with compressed caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvc_trt import Engine, build
from kvc_trt.errors import InputError
from kvc_trt.models.formats import open_checkpoint, weights_of
from kvc_trt.models.weights import check_weights
from tests.oracles.answers import STEPS, answer_of, prompts, reference_logits
from tests.oracles.family_models import LONGROPE, MODELS, our_config, written

BAR = 1e-4
LINEAR = [name for name in MODELS if our_config(name).linear_layers]
ROOM: dict[str, Any] = {"max_output_len": 32, "verify": False}


class Oracle(NamedTuple):
    """A checkpoint, transformers' model of it, and its answers to `prompts()`."""

    path: Path
    answers: list[list[int]]
    logits: list[torch.Tensor]
    """[steps,vocab] of each prompt: after it, and after each token of the answer but the last."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    @cache
    def asked(name: str) -> Oracle:
        path = tmp_path_factory.mktemp(name) / "checkpoint"
        model = written(name, path)
        answers, logits = [], []
        for prompt in prompts():
            answer, after = answer_of(model, prompt)
            answers.append(answer)
            logits.append(after)
        return Oracle(path, answers, logits)

    return asked


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_has_the_logits_of_transformers(name: str, oracle: Callable[[str], Oracle]) -> None:
    expected = oracle(name)
    checkpoint = open_checkpoint(expected.path)
    config, weights = checkpoint.config, weights_of(checkpoint)
    check_weights(config, weights)
    for prompt, answer, logits in zip(prompts(), expected.answers, expected.logits, strict=True):
        found = reference_logits(config, weights, prompt, answer)
        torch.testing.assert_close(found, logits, rtol=BAR, atol=BAR)
        assert found.argmax(dim=-1).tolist() == answer
    assert len({token for answer in expected.answers for token in answer}) > 4  # not one word for ever


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 2}, "--tp 2: .*(linear layers|experts)"),
        ({"draft_tokens": 2}, "the state of linear layers of the model takes in each token"),
    ],
)
def test_features_that_linear_layers_lack_are_refused_by_name(
    name: str, changes: dict[str, Any], words: str, oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        build(str(oracle(name).path), output=tmp_path / "engine", max_input_len=704, **ROOM, **changes)
    assert not (tmp_path / "engine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "torch"])
@pytest.mark.parametrize("name", LINEAR)
def test_turns_on_linear_layers_answer_as_transformers_does_to_the_whole_text(
    name: str, backend: str, oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    """Contexts, saved and loaded, end before the convolution is full, within a chunk, at its end, and later."""
    expected, text = oracle(name), prompts()[1].tolist()
    build(str(expected.path), policy="full", output=tmp_path / "engine", max_input_len=704, **ROOM)
    with Engine.open(tmp_path / "engine", backend=backend, threads=1) as engine:
        for first in (1, 2, 40, 64, 65, 89):
            engine.save_context(engine.context(text[:first]), tmp_path / f"context-{first}")
            kept = engine.load_context(tmp_path / f"context-{first}")
            (found,) = engine.generate([text[first:]], max_new_tokens=STEPS, ignore_eos=True, context=kept)
            assert list(found.token_ids) == expected.answers[1], first


@pytest.mark.as_users
@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", LINEAR)
def test_quantised_linear_layers_stay_within_the_bars(
    name: str, weights: str, oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    """Their inputs, and those of experts beside them, are wide: rounded to 8 bits they miss the bars of logits."""
    settings = {"policy": "rocketkv", "token_budget": 64, "max_input_len": 256, "weights": weights}
    build(str(oracle(name).path), output=tmp_path / "engine", **settings, **ROOM)
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        report = engine.verify(level="quick", steps=4, samples=2)
    assert report.passed, report.failures


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_engines_answer_as_transformers_does(name: str, oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """With LongRoPE an engine has the factors of its longest sequence, like a model with long factors in both lists."""
    expected, answers = oracle(name), oracle(name).answers
    if name == "phi3-longrope":
        long = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
        model = written(name, tmp_path / "long", rope_parameters=long)
        answers = [answer_of(model, prompt)[0] for prompt in prompts()]
        assert [one == other for one, other in zip(answers, expected.answers, strict=True)] == [False, False, True]
    build(str(expected.path), policy="full", output=tmp_path / "engine", max_input_len=704, **ROOM)
    for backend in ("onnxruntime", "openvino", "torch"):
        with Engine.open(tmp_path / "engine", backend=backend, threads=1) as engine:
            found = engine.generate([prompt.tolist() for prompt in prompts()], max_new_tokens=STEPS, ignore_eos=True)
            assert [list(output.token_ids) for output in found] == answers, backend


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_compressed_cache_is_that_of_the_reference(
    name: str, oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    """Verification compares operators, codes, logits, turns, drafts and greedy tokens with the reference.

    Where every layer slides, nothing else is compressed: the caches are rings, in codes.
    """
    settings = {"policy": "rocketkv", "token_budget": 64, "kv_cache": "int8", "max_input_len": 256}
    windows = our_config(name).windows(288)
    if windows is not None and all(windows):
        settings = {"policy": "full", "kv_cache": "int8", "max_input_len": 256}
    no_drafts = name in LINEAR or windows is not None
    settings |= {} if no_drafts else {"draft_tokens": 2}
    build(str(oracle(name).path), output=tmp_path / "engine", **settings, **ROOM)
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        report = engine.verify(level="quick", steps=4, samples=2)
        assert report.passed, report.failures
        checks = [check.name for rung in report.rungs for check in rung.checks]
        assert {one.partition(":")[0] for one in checks} >= ({"turns"} if no_drafts else {"turns", "drafts"})
        prompt = prompts()[1].tolist()
        kept = engine.context(prompt)
        engine.save_context(kept, tmp_path / "context")
        asked: dict[str, Any] = {"prompts": [prompt[:5]], "max_new_tokens": STEPS}
        (alone,) = engine.generate(**asked, context=kept)
        (again,) = engine.generate(**asked, context=engine.load_context(tmp_path / "context"))
        assert alone.token_ids == again.token_ids
