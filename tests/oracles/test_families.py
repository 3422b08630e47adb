"""Every family beside transformers: logits, greedy answers, and engines with compressed caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvc_trt import Engine, build, policies
from kvc_trt.models.formats import open_checkpoint, weights_of
from kvc_trt.models.weights import check_weights
from kvc_trt.reference.decoder import ReferenceDecoder
from tests.oracles.family_models import LONGROPE, MODELS, SHAPE, our_config, written

LENGTHS = (5, 90, 700)
STEPS = 8
BAR = 1e-4
ROOM: dict[str, Any] = {"max_output_len": 32, "verify": False}


class Oracle(NamedTuple):
    """A checkpoint, transformers' model of it, and its answers to `prompts()`."""

    path: Path
    answers: list[list[int]]
    logits: list[torch.Tensor]
    """[steps,vocab] of each prompt: after it, and after each token of the answer but the last."""


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(13)
    return [torch.randint(3, SHAPE["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def answer_of(model: Any, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Tokens of transformers' greedy answer, and the logits [steps,vocab] before each of them."""
    found = model.generate(
        prompt[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=STEPS, eos_token_id=-1, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits)


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
        lengths: dict[str, Any] = {"max_input_len": len(prompt), "max_output_len": STEPS}
        parameters = policies.resolve("full", model=config, token_budget=None, **lengths)
        decoder = ReferenceDecoder(config, weights, method=policies.method(parameters), parameters=parameters)
        first, stored = decoder.prefill(prompt[None], torch.tensor([len(prompt)]))
        found = [first, *(decoder.decode(torch.tensor([token]), stored) for token in answer[:-1])]
        torch.testing.assert_close(torch.cat(found), logits, rtol=BAR, atol=BAR)
        assert torch.cat(found).argmax(dim=-1).tolist() == answer
    assert len({token for answer in expected.answers for token in answer}) > 4  # not one word for ever


@pytest.mark.parametrize("name", MODELS)
def test_engines_answer_as_transformers_does(name: str, oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """With LongRoPE an engine has the factors of its longest sequence, as a model has of which both lists are long."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_compressed_cache_is_that_of_the_reference(
    name: str, oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    """Verification compares operators, codes, logits, turns, drafts and greedy tokens with the reference."""
    settings = {"policy": "rocketkv", "token_budget": 64, "kv_cache": "int8", "max_input_len": 256}
    slides = our_config(name).windows(288) is not None  # then drafts are refused
    settings |= {} if slides else {"draft_tokens": 2}
    build(str(oracle(name).path), output=tmp_path / "engine", **settings, **ROOM)
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        report = engine.verify(level="quick", steps=4, samples=2)
        assert report.passed, report.failures
        checks = [check.name for rung in report.rungs for check in rung.checks]
        assert {one.partition(":")[0] for one in checks} >= ({"turns"} if slides else {"turns", "drafts"})
        prompt = prompts()[1].tolist()
        kept = engine.context(prompt)
        engine.save_context(kept, tmp_path / "context")
        asked: dict[str, Any] = {"prompts": [prompt[:5]], "max_new_tokens": STEPS}
        (alone,) = engine.generate(**asked, context=kept)
        (again,) = engine.generate(**asked, context=engine.load_context(tmp_path / "context"))
        assert alone.token_ids == again.token_ids
