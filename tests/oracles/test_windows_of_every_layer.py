"""Models whose every layer slides, beyond their window, beside transformers: rings alone, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
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
from kvc_trt.graph.build import build_decode, build_extend, build_prefill
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sharding import shards
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.oracles.answers import STEPS, answer_of
from tests.oracles.family_models import SHAPE, our_config, their_config, written

WINDOW = 64
LENGTH = 200
LENGTHS: dict[str, Any] = {"max_input_len": 256, "max_output_len": 32}
EVERY, SOME = "mistral-past-its-window", "qwen2-two-layers-past-their-window"
"""A model whose every layer slides, and one whose first layer attends to everything."""
COMPRESSING = [name for name, *_ in policies.available() if name != "full"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The folder of a small model, and transformers' model of it."""

    @cache
    def made(name: str) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp(name) / "checkpoint"
        return path, written(name, path)

    return made


def prompt() -> torch.Tensor:
    return torch.randint(3, SHAPE["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(5))


def resolved(name: str, policy: str = "full", *, longest: int = 288, **changes: Any) -> policies.PolicyParameters:
    budget = None if policy == "full" else 128
    lengths = {"max_input_len": longest - 32, "max_output_len": 32}
    return policies.resolve(policy, model=our_config(name), token_budget=budget, **lengths, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "ranks"),
    [
        (EVERY, "onnxruntime", None),
        (EVERY, "openvino", None),
        (EVERY, "torch", None),
        (EVERY, "torch", 2),
        (SOME, "onnxruntime", None),
        (SOME, "torch", 2),
    ],
)
def test_a_turn_answers_as_transformers_does_to_the_whole_text(
    name: str, backend: str, ranks: int | None, checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Contexts, saved and loaded, are shorter than the window, as long, and longer; so are turns."""
    path, model = checkpoint(name)
    answer, _ = answer_of(model, prompt())
    build(str(path), policy="full", output=tmp_path / "engine", verify=False, tensor_parallel=ranks, **LENGTHS)
    with Engine.open(tmp_path / "engine", backend=backend, threads=1) as engine:
        for first in (1, WINDOW, WINDOW + 1, 150, LENGTH - 1):
            engine.save_context(engine.context(prompt()[:first].tolist()), tmp_path / f"context-{first}")
            kept = engine.load_context(tmp_path / f"context-{first}")
            (found,) = engine.generate([prompt()[first:].tolist()], max_new_tokens=STEPS, ignore_eos=True, context=kept)
            assert list(found.token_ids) == answer, first


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "k8v4"])
def test_codes_in_the_rings_pass_every_check(
    form: str, checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Verification compares operators, codes, logits, turns and greedy tokens with the reference, at every level."""
    chosen: dict[str, Any] = {"policy": "full", "kv_cache": form, "verify": False}
    build(str(checkpoint(EVERY)[0]), output=tmp_path / "engine", **chosen, **LENGTHS)
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        for level in ("quick", "full"):
            report = engine.verify(level=level, steps=4, samples=2)
            assert report.passed, report.failures
            checks = {check.name for rung in report.rungs for check in rung.checks}
            assert {"KvcSlidingAttention values", "turns: max logit error"} <= checks


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rocketkv", "h2o"])
def test_policies_act_on_the_layer_that_attends_to_everything(
    policy: str, checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    parameters = resolved(SOME, policy)
    assert [parameters.groups(layer)[0].parameters.chooses for layer in range(3)] == [True, False, False]
    chosen: dict[str, Any] = {"policy": policy, "token_budget": 64, "verify": False}
    build(str(checkpoint(SOME)[0]), output=tmp_path / "engine", **chosen, **LENGTHS)
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        report = engine.verify(level="quick", steps=4, samples=2)
        assert report.passed, report.failures


@pytest.mark.parametrize("first", [0, 1, 3, 4, 28])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2-moe", "smollm3"])
def test_layers_slide_where_transformers_lets_them_without_layer_types(name: str, first: int) -> None:
    """Files of earlier releases have `max_window_layers` alone; SmolLM3 slides where it does not rotate."""
    own = {"no_rope_layers": [1, 0, 0, 1]} if name == "smollm3" else {}
    changes = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": first}
    fields = json.loads(their_config(name, **changes, **own).to_json_string())
    slides = tuple(WINDOW if kind == "sliding_attention" else 0 for kind in fields.pop("layer_types"))
    found = parse_config(fields, name).windows(288)
    assert (found or (0,) * 4) == slides


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "smollm3"])
def test_a_window_of_null_is_none_and_an_absent_one_the_default_of_transformers(name: str) -> None:
    """Null says more than nothing: transformers takes 4096 for an absent window of Qwen's."""
    switched_on = {"use_sliding_window": True, "max_window_layers": 1}
    theirs = their_config(name, **switched_on, sliding_window=None)
    assert theirs.sliding_window is None
    fields = {**json.loads(theirs.to_json_string()), **switched_on, "sliding_window": None, "layer_types": None}
    assert parse_config(fields, name).windows(8192) is None
    del fields["sliding_window"]
    found = parse_config(fields, name).windows(8192)
    assert (None if found is None else max(found)) == their_config(name, **switched_on).sliding_window


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([EVERY, SOME]),
    st.lists(st.integers(1, 100), min_size=1, max_size=4).filter(lambda parts: sum(parts) <= LENGTH),
)
def test_a_text_in_pieces_has_the_logits_of_the_whole(name: str, parts: list[int]) -> None:
    """The first piece is a prompt, and the others are turns, or steps where they are short."""
    config = our_config(name)
    decoder, ids = reference_of(config), prompt()[: sum(parts)]
    whole, _ = decoder.prefill(ids[None], torch.tensor([len(ids)]))
    found, stored = decoder.prefill(ids[None, : parts[0]], torch.tensor([parts[0]]))
    start = parts[0]
    for count in parts[1:]:
        piece = ids[start : start + count]
        if count <= 3:
            for token in piece:
                found = decoder.decode(token[None], stored)
        else:
            found = decoder.extend(piece[None], torch.tensor([count]), stored)
        start += count
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


def reference_of(config: ModelConfig) -> ReferenceDecoder:
    parameters = policies.resolve("full", model=config, token_budget=None, **LENGTHS)
    method, weights = policies.method(parameters), RandomWeights(config, 3)
    return ReferenceDecoder(config, weights, method=method, parameters=parameters, dtype=torch.float64)


@pytest.mark.parametrize("policy", ["full", "rocketkv", "h2o"])
def test_within_the_window_an_engine_is_that_of_a_model_without_one(policy: str, tmp_path: Path) -> None:
    """Its graphs have the same bytes, so that engines within the window stay as they were."""
    windowed = our_config(EVERY)
    path = tmp_path / "weights.safetensors"
    write_weights(windowed, RandomWeights(windowed, 0), path, weights="fp32", length=300)
    weights = GraphWeights(path)
    graphs = []
    for config in (windowed, replace(windowed, sliding_window=None)):
        budget = None if policy == "full" else 16
        lengths = {"max_input_len": WINDOW - 32, "max_output_len": 32}
        parameters = policies.resolve(policy, model=config, token_budget=budget, **lengths)
        assert parameters.layer_windows is None
        makers = build_prefill, build_decode, build_extend
        graphs.append([make(config, parameters, weights=weights) for make in makers])
    one, other = ([graph.SerializeToString(deterministic=True) for graph in each] for each in graphs)
    assert one == other


@pytest.mark.parametrize("policy", COMPRESSING)
def test_a_policy_without_a_layer_to_act_on_is_refused(policy: str) -> None:
    said = re.escape(f"policy {policy} compresses layers of full attention, and in MistralForCausalLM 2 of 2 slide in")
    more = {"head_scores": ((0.5, 0.5), (0.5, 0.5))} if policy == "duo-attention" else {}
    with pytest.raises(InputError, match=said) as caught:
        resolved(EVERY, policy, **more)
    assert caught.value.hint == (
        f"--policy full, with which each keeps its window, or sequences of at most {WINDOW} tokens"
    )
    assert resolved(EVERY, policy, longest=WINDOW, **more).layer_windows is None


def test_drafts_are_refused_by_name(checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sliding layers of the model drop a token"):
        build(str(checkpoint(EVERY)[0]), policy="full", output=tmp_path / "engine", draft_tokens=2, **LENGTHS)


def test_backends_that_need_a_kernel_for_each_operator_are_refused_by_name() -> None:
    assert supporting(resolved(EVERY), our_config(EVERY), backends()) == ["onnxruntime", "openvino", "torch"]
    for backend in ("tensorrt", "tensorrt-llm"):
        with pytest.raises(InputError, match=f"backend {backend} has no kernel for prompt eviction layer-window"):
            check_supported(resolved(EVERY), our_config(EVERY), backend, backends())


def test_ranks_divide_the_rings() -> None:
    check_parallel(2, our_config(EVERY), resolved(EVERY))
    local = shards(our_config(EVERY), 2)[0].local
    assert local.windows(288) == (WINDOW, WINDOW)
