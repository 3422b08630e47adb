"""`plan` refuses what a build refuses, in the same words."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvc_trt.backends.registry import backends
from kvc_trt.backends.tensorrt_llm.parts import missing_part
from kvc_trt.cli.main import run
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.engine.resolution.resolve import resolve
from kvc_trt.errors import InputError
from kvc_trt.models.config import (
    Attention,
    ClampedGate,
    Experts,
    FeedForward,
    Linear,
    LongRope,
    ModelDescription,
    Norms,
    Yarn,
)
from tests.graph.small_models import LLAMA
from tests.oracles.family_models import their_config

SHAPES = Path(__file__).resolve().parents[1] / "models" / "published_shapes"
LENGTHS = ("--max-input-len", "1024", "--max-output-len", "64", "--token-budget", "256")
EXPERTS = "kernel for feed-forward blocks of experts"
SOFTMAX = "kernel for attention with capped logits or sinks"
ABLE = {"tensorrt": "it runs on onnxruntime, openvino, torch"}


@pytest.mark.parametrize(
    "question", [[], ["--compare"], ["--memory", "64GiB"], ["--memory", "64GiB", "--policy", "full"]]
)
@pytest.mark.parametrize(
    ("model", "reason"), [("gemma-3-12b", "sliding layers of the model"), ("qwen3.5-9b", "the state of linear layers")]
)
def test_drafts_are_refused_where_a_build_refuses_them(
    model: str, reason: str, question: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--model", model, "--draft-tokens", "4", *question]) == 2
    said = capsys.readouterr().err
    assert "--draft-tokens 4: policy " in said
    assert f"checks no drafts: {reason}" in said


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (["--draft-tokens", "4", "--backend", "tensorrt-llm"], "draft_tokens: 4 is for --backend"),
        (["--weights", "fp8", "--backend", "onnxruntime"], "--weights fp8: TensorRT alone multiplies"),
        (["--weights", "bf16", "--kv-cache", "int8", "--set", "fp8_bounds=false"], "this engine computes in bfloat16"),
        (
            ["--set", "all_logits=true", "--policy", "snapkv-gqa", "--set", "layer_budget=squeeze-online"],
            "--all-logits: policy snapkv-gqa takes no turns",
        ),
    ],
)
def test_settings_are_refused_that_no_build_takes(
    setting: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--model", "llama3.1-8b", *LENGTHS, *setting]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "backend", "words"),
    [
        ("mixtral-8x7b", "tensorrt", f"MixtralForCausalLM: backend tensorrt has no {EXPERTS}; {ABLE['tensorrt']}"),
        ("gemma-2-9b", "tensorrt", f"Gemma2ForCausalLM: backend tensorrt has no {SOFTMAX}; {ABLE['tensorrt']}"),
        ("gpt-oss-20b", "tensorrt", f"GptOssForCausalLM: backend tensorrt has no {EXPERTS}; {ABLE['tensorrt']}"),
        ("mixtral-8x7b", "tensorrt-llm", "backend tensorrt-llm has no code for experts; it runs on onnxruntime"),
        ("command-r-v01", "tensorrt-llm", "LayerNorm, attention and feed-forward side by side, a scale of logits; "),
        ("granite-3.1-8b", "tensorrt-llm", "a scale of attention, a scale of embeddings, a scale of what layers add"),
        ("glm4", "tensorrt-llm", "norms of results, heads that rotate in part; it runs on onnxruntime"),
        ("opt", "tensorrt-llm", "feed-forward blocks without a gate, the activation relu, biases in the feed-forward"),
        ("gemma-2-9b", "tensorrt-llm", "has no code for sliding layers, capped logits, norms of results, "),
        ("gemma-3-12b", "tensorrt-llm", "has no code for sliding layers, rotary bases by layer, norms of results, "),
    ],
)
def test_a_plan_and_a_build_refuse_the_model_in_the_same_words(
    model: str, backend: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = _where(model, tmp_path)
    lengths = {"token_budget": 64, "max_input_len": 128, "max_output_len": 32}
    config = BuildConfig(model=name, backend=backend, **lengths)
    with pytest.raises(InputError) as caught:
        resolve(config, choose_model(name), backend, backends())
    assert words in caught.value.message
    assert caught.value.hint == "--backend onnxruntime"
    options = [part for key, value in lengths.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    assert run(["plan", "--model", name, "--backend", backend, *options]) == 2
    assert caught.value.message in capsys.readouterr().err


def _where(model: str, directory: Path) -> str:
    """Return a preset's name, the directory of a published shape, or that of a family's small model."""
    if (SHAPES / model).is_dir():
        return str(SHAPES / model)
    if "-" in model:
        return model
    (directory / "config.json").write_text(their_config(model).to_json_string(), encoding="utf-8")
    return str(directory)


OTHERS: dict[str, Any] = {
    "attention": (
        (Attention(), Attention(window=8)),
        (Attention(rotary=False),),
        (Attention(rotary_base=1e4),),
        (Attention(gated=True),),
        (Attention(linear=Linear(2, 2, 8, 8, 4)),),
    ),
    "norms": (
        *(Norms(place=place) for place in ("after", "both", "parallel", "shared")),
        *(Norms(kind="layer"), Norms(weight=False), Norms(bias=True), Norms(heads="together"), Norms(heads="apart")),
    ),
    "feed_forward": (FeedForward(gated=False), FeedForward(activation="gelu"), FeedForward(bias=True)),
    "experts": (Experts(4, 2, 8),),
    "clamped_gate": (ClampedGate(7.0, 1.7),),
    "rotary_channels": (LLAMA.head_size // 2,),
    "attention_scale": (0.3,),
    "attention_softcap": (50.0,),
    "attention_sinks": (True,),
    "embedding_scale": (2.0,),
    "learned_positions": (True,),
    "residual_scale": (0.5,),
    "logit_scale": (0.5,),
    "logit_softcap": (30.0,),
}
"""Every field of a description -> values for which a model is not Llama's."""


def test_each_part_that_is_not_llamas_is_named_alone() -> None:
    model = replace(LLAMA, qk_norm=True)
    assert missing_part(model) is None
    assert OTHERS.keys() == {field.name for field in fields(ModelDescription)}
    found = []
    for name, values in OTHERS.items():
        for value in values:
            part = missing_part(replace(model, description=ModelDescription(**{name: value})))
            assert part is not None, (name, value)
            found.append(part)
    assert not any("," in part for part in found)
    shared = {"code for capped logits", "code for norms of results", "code for attention and feed-forward side by side"}
    assert {part for part in found if found.count(part) > 1} == shared


def test_factors_of_attention_are_named_and_factors_of_one_are_none() -> None:
    ones, half = (1.0,) * (LLAMA.head_size // 2), 64
    for scaling, name in ((Yarn(8.0, half, 1.2), "YaRN"), (LongRope(ones, ones, half, 1.2), "LongRoPE")):
        assert missing_part(replace(LLAMA, rotary_scaling=scaling)) == f"code for the attention factor of {name}"
        assert missing_part(replace(LLAMA, rotary_scaling=replace(scaling, attention_factor=1.0))) is None
