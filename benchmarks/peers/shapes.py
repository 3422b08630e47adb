"""The two models that everybody runs: real shapes, random weights, written once as a Hugging Face directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvc_trt.files.atomic import write_json
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights


@dataclass(frozen=True)
class Shape:
    """One model."""

    name: str
    model: ModelConfig
    description: str


def _llama(**sizes: Any) -> ModelConfig:
    common: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "dtype": "float32", "head_size": 64, "norm_epsilon": 1e-5,
        "rotary_base": 500000.0, "rotary_scaling": None, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "qkv_bias": False, "output_bias": False, "qk_norm": False,
        "sliding_window": None, "bos_token_id": 1, "eos_token_ids": (2,),
    }  # fmt: skip
    return ModelConfig(**{**common, **sizes})


M8 = Shape(
    "m8",
    _llama(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4,
    ),
    "8 layers, hidden 1024, FFN 2816, 16/4 heads of 64, vocabulary 32,000",
)  # fmt: skip
M1B = Shape(
    "m1b",
    _llama(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, dtype="bfloat16", tie_word_embeddings=True,
    ),
    "16 layers, hidden 2048, FFN 8192, 32/8 heads of 64, vocabulary 128,256, tied (1.2 billion parameters)",
)  # fmt: skip
SHAPES = {shape.name: shape for shape in (M8, M1B)}


def write_checkpoint(shape: Shape, directory: Path) -> None:
    """Write config.json and model.safetensors; the weights are those of seed 0 in the shape's dtype."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    weights, dtype = RandomWeights(shape.model, 0), getattr(torch, shape.model.dtype)
    tensors = {name: torch.from_numpy(weights.read(name)).to(dtype) for name in weights.names()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", _config(shape.model))


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [model.architecture],
        "model_type": "llama",
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_ids[0],
    }


def read_config(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config
