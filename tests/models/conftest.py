from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sources.hugging_face import parse_config

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def tiny_fields() -> Callable[..., dict[str, Any]]:
    """config.json of a small Llama with some fields replaced; `absent` removes a field."""

    def fields(absent: str | None = None, **changes: Any) -> dict[str, Any]:
        return {name: value for name, value in (TINY | changes).items() if name != absent}

    return fields


@pytest.fixture
def tiny_config(tiny_fields: Callable[..., dict[str, Any]]) -> Callable[..., ModelConfig]:
    def config(**changes: Any) -> ModelConfig:
        return parse_config(tiny_fields(**changes), "test")

    return config
