"""Sliding layers beside transformers: turns, policies on the full layers, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import Engine, build, policies
from kvc_trt.backends.registry import backends
from kvc_trt.engine.parallel import check_parallel
from kvc_trt.engine.supported import check_supported, supporting
from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sharding import shards
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.oracles.answers import STEPS, answer_of
from tests.oracles.family_models import SHAPE, our_config, written

WINDOW = 64
LENGTH = 200
LENGTHS: dict[str, Any] = {"max_input_len": 256, "max_output_len": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a small Gemma 3, whose window is WINDOW, and transformers' model of it."""
    path = tmp_path_factory.mktemp("gemma3") / "checkpoint"
    return path, written("gemma3", path)


def prompt() -> torch.Tensor:
    return torch.randint(3, SHAPE["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(5))


def reference_of(config: ModelConfig, weights: Any) -> ReferenceDecoder:
    parameters = policies.resolve("full", model=config, token_budget=None, **LENGTHS)
    method = policies.method(parameters)
    return ReferenceDecoder(config, weights, method=method, parameters=parameters, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("onnxruntime", None), ("openvino", None), ("torch", None), pytest.param("torch", 2, marks=pytest.mark.slow)],
)
def test_a_turn_answers_as_transformers_does_to_the_whole_text(
    backend: str, ranks: int | None, checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """Contexts are shorter than the window, as long, and longer; so are turns."""
    path, model = checkpoint
    answer, _ = answer_of(model, prompt())
    build(str(path), policy="full", output=tmp_path / "engine", verify=False, tensor_parallel=ranks, **LENGTHS)
    with Engine.open(tmp_path / "engine", backend=backend, threads=1) as engine:
        for first in (1, 40, WINDOW, WINDOW + 1, 90, 150, LENGTH - 1):
            kept = engine.context(prompt()[:first].tolist())
            (found,) = engine.generate([prompt()[first:].tolist()], max_new_tokens=STEPS, ignore_eos=True, context=kept)
            assert list(found.token_ids) == answer, first


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=4).filter(lambda parts: sum(parts) <= LENGTH), st.data())
def test_a_ring_holds_what_a_whole_prompt_would_see(parts: list[int], data: st.DataObject) -> None:
    """A text that is read in one piece, or as a prompt, turns and steps of any lengths, gives the same logits."""
    config = our_config("gemma3")
    decoder, ids = reference_of(config, RandomWeights(config, 3)), prompt()[: sum(parts)]
    whole, _ = decoder.prefill(ids[None], torch.tensor([len(ids)]))
    found, cache = decoder.prefill(ids[None, : parts[0]], torch.tensor([parts[0]]))
    start = parts[0]
    for count in parts[1:]:
        piece = ids[start : start + count]
        if count <= 3 and data.draw(st.booleans()):
            for token in piece:
                found = decoder.decode(token[None], cache)
        else:
            found = decoder.extend(piece[None], torch.tensor([count]), cache)
        start += count
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("policy", "kv_cache"),
    [("rocketkv", "auto"), ("snapkv-gqa", "int8"), ("h2o", "auto"), ("tova", "int8"), ("sliding-window", "auto")],
)
def test_policies_act_on_the_full_layers(
    policy: str, kv_cache: str, checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """Verification compares operators, codes, logits, turns and greedy tokens with the reference."""
    chosen = {"policy": policy, "token_budget": 64, "kv_cache": kv_cache}
    build(str(checkpoint[0]), output=tmp_path / "engine", verify=False, **chosen, **LENGTHS)
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        report = engine.verify(level="quick", steps=4, samples=2)
        assert report.passed, report.failures
        asked: dict[str, Any] = {"prompts": [[5, 6, 7]], "max_new_tokens": STEPS}
        kept = engine.context(prompt().tolist())
        engine.save_context(kept, tmp_path / "context")
        (alone,) = engine.generate(**asked, context=kept)
        (again,) = engine.generate(**asked, context=engine.load_context(tmp_path / "context"))
        assert alone.token_ids == again.token_ids


def resolved(policy: str, *, longest: int = 256, **changes: Any) -> policies.PolicyParameters:
    config = our_config("gemma3")
    budget = None if policy == "full" else 64
    lengths = {"max_input_len": longest - 32, "max_output_len": 32}
    return policies.resolve(policy, model=config, token_budget=budget, **lengths, **changes)


def test_a_window_that_covers_the_longest_sequence_is_dropped() -> None:
    command = our_config("command-r7b-past-its-window")
    assert command.windows(WINDOW) is None
    assert command.windows(WINDOW + 1) == (WINDOW, WINDOW, WINDOW, 0)


def test_layers_that_rotate_by_a_base_of_their_own_always_slide() -> None:
    """A policy that does its own rotation, such as expected attention, has the tables of the other layers."""
    assert our_config("gemma3").windows(WINDOW - 1) == (WINDOW - 1, WINDOW - 1, 0, WINDOW - 1)


def test_the_parameters_of_a_sliding_layer_choose_nothing() -> None:
    sliding = resolved("snapkv-gqa")
    assert sliding.layer_windows == (WINDOW, WINDOW, 0, WINDOW)
    assert [sliding.layer_capacity(layer) for layer in (0, 1, 3)] == [WINDOW] * 3
    assert [sliding.groups(layer)[0].parameters.chooses for layer in range(4)] == [False, False, True, False]


def test_other_windows_than_those_of_the_model_are_refused() -> None:
    parameters = replace(resolved("full"), layer_windows=(WINDOW, WINDOW, 0, 0))
    with pytest.raises(InputError, match="layer_windows"):
        parameters.check(our_config("gemma3"))


@pytest.mark.parametrize(
    ("policy", "changes", "words"),
    [
        ("pyramidkv", {}, "policy pyramidkv divides a budget among all layers, and 3 of 4 slide"),
        ("snapkv-gqa", {"layer_budget": "squeeze"}, "--layer-budget squeeze divides a budget among all layers"),
        ("h2o", {"layer_budget": "squeeze-online"}, "--layer-budget squeeze-online divides a budget"),
    ],
)
def test_a_division_among_layers_is_refused(policy: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolved(policy, **changes)


def test_drafts_are_refused_by_name(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    chosen = {"policy": "rocketkv", "token_budget": 64, "draft_tokens": 2, "verify": False}
    with pytest.raises(InputError, match="sliding layers of the model drop a token"):
        build(str(checkpoint[0]), output=tmp_path / "engine", **chosen, **LENGTHS)


def test_backends_that_need_a_kernel_for_each_operator_are_refused_by_name() -> None:
    assert supporting(resolved("full"), our_config("gemma3"), backends()) == ["onnxruntime", "openvino", "torch"]
    with pytest.raises(InputError, match="backend tensorrt has no kernel for prompt eviction layer-window"):
        check_supported(resolved("full"), our_config("gemma3"), "tensorrt", backends())


def test_ranks_divide_the_rings_and_refuse_what_else_has_no_kernel() -> None:
    """Nothing is chosen in a ring, whatever runs it; a policy still chooses in the full layers."""
    config = our_config("gemma3")
    for policy in ("full", "rocketkv"):
        check_parallel(2, config, resolved(policy))
    with pytest.raises(InputError, match="policy h2o is not divided among ranks, as it has no kernel"):
        check_parallel(2, config, resolved("h2o"))
    with pytest.raises(InputError, match="a norm over all heads of queries or keys is not divided"):
        shards(our_config("olmo3"), 2)
