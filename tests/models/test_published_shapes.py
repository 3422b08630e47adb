"""Shapes of published models that are no presets, as their config.json gives them: their sizes, and what plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.cli.main import run
from kvc_trt.models.pretrained_config import from_pretrained_config, to_pretrained_config
from kvc_trt.models.sources.hugging_face import read_config
from kvc_trt.models.weights import count_parameters

SHAPES = Path(__file__).parent / "published_shapes"
WEIGHTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SIZES = [
    ("command-r-v01", 34.98, (40, 64, 64, 128), 131072, "float16"),
    ("falcon-7b", 6.92, (32, 71, 1, 64), 2048, "bfloat16"),
    ("gemma-2-9b", 9.24, (42, 16, 8, 256), 8192, "float32"),
    ("gpt-oss-20b", 20.91, (24, 64, 8, 64), 131072, "bfloat16"),
    ("granite-3.1-8b", 8.17, (40, 32, 8, 128), 131072, "bfloat16"),
    ("olmo-2-7b", 7.30, (32, 32, 32, 128), 4096, "float32"),
]


@pytest.mark.parametrize(("name", "billions", "shape", "longest", "dtype"), SIZES)
def test_published_configurations_have_their_published_sizes(
    name: str, billions: float, shape: tuple[int, ...], longest: int, dtype: str
) -> None:
    config = read_config(SHAPES / name)
    assert count_parameters(config) / 1e9 == pytest.approx(billions, abs=0.005)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_size)
    assert (config.num_hidden_layers, *heads) == shape
    assert config.max_position_embeddings == longest
    assert config.dtype == dtype
    assert from_pretrained_config(to_pretrained_config(config), "engine") == config


@pytest.mark.parametrize(("name", "dtype"), [(name, own[-1]) for name, *own in SIZES])
def test_plan_needs_only_the_config_of_a_published_shape(
    name: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--max-input-len", "1920", "--max-output-len", "128", "--token-budget", "512"]
    assert run(["plan", "--model", str(SHAPES / name), "--policy", "rocketkv", *lengths]) == 0
    shown = capsys.readouterr().out
    assert "policy rocketkv" in shown
    assert f"weights: {WEIGHTS[dtype]}, " in shown
