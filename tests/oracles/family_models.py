"""Small random checkpoints of families, as transformers writes them."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sources.hugging_face import parse_config

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ORIGINAL_LENGTH = 128
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 3.0 * pair for pair in range(8)],
}  # fmt: skip
LINEAR_SHAPE = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": 900}),
    "mistral-past-its-window": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {}),
    "qwen2-past-its-window": (
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
    ),
    "qwen2-two-layers-past-their-window": (
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-past-its-window": (
        "Qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3-past-its-window": ("Phi3", {"sliding_window": 47}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL_LENGTH}),
    "phi4-mini": ("Phi3", {"partial_rotary_factor": 0.67, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "smollm3-past-its-window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 64},
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "gpt-neox-one-after-the-other": (
        "GPTNeoX",
        {"num_key_value_heads": 4, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 900}),
    "starcoder2-past-its-window": ("Starcoder2", {"sliding_window": 64}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
            "logits_scaling": 0.7,
            "mlp_bias": True,
        },
    ),
    "olmo": ("Olmo", {}),
    "falcon-7b": ("Falcon", {"num_kv_heads": 4}),
    "falcon-40b": ("Falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}),
    "falcon-11b": (
        "Falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-one-after-the-other": (
        "Falcon",
        {"parallel_attn": False, "multi_query": False, "tie_word_embeddings": False},
    ),
    "command-r": ("Cohere", {"logit_scale": 0.4}),
    "command-r-plus": ("Cohere", {"logit_scale": 0.4, "use_qk_norm": True}),
    "command-r7b": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 900, "logit_scale": 0.4}),
    "command-r7b-past-its-window": (
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": 64, "logit_scale": 0.4},
    ),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 64,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2-within-its-window": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 900,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 64,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    "command-r7b-without-rotation": (
        "Cohere2",
        {"layer_types": ["full_attention"] * 2, "attention_bias": True, "logit_scale": 0.4},
    ),
    "opt": ("OPT", {"num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-past-its-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 64}),
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "gpt-oss-within-its-window": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 900,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen2-moe-past-its-window": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 3,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **LINEAR_SHAPE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3.5": ("Qwen3_5", {**LINEAR_SHAPE, "linear_num_value_heads": 2, "linear_value_head_dim": 16}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **LINEAR_SHAPE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "head_dim": 32,
        },
    ),
    "qwen3-moe-past-its-window": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 64,
        },
    ),
}
"""A name -> the prefix of transformers' classes, and what differs from `SHAPE`: every family and variant of it."""


def config_class(prefix: str) -> str:
    """Return transformers' class of configurations of a model; plain ones of some name models that read images."""
    return f"{prefix}TextConfig" if prefix in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else f"{prefix}Config"


def their_config(name: str, **other: Any) -> Any:
    """Return transformers' configuration of the model `name` of `MODELS`, with `other` fields."""
    import transformers

    prefix, changes = MODELS[name]
    settings = deepcopy({**SHAPE, **changes, **other})  # transformers writes into dictionaries that it is given
    config = getattr(transformers, config_class(prefix))(**settings, attn_implementation="eager")
    config.architectures = [f"{prefix}ForCausalLM"]
    return config


def our_config(name: str) -> ModelConfig:
    """Return our configuration of the same model."""
    return parse_config(json.loads(their_config(name).to_json_string()), name)


def _adds_one(name: str, parameter_name: str) -> bool:
    """Return whether a norm multiplies by one more than its weight."""
    of_result = "linear_attn" in parameter_name
    return name.startswith(("gemma", "qwen3-next", "qwen3.5")) and not of_result


def written(name: str, directory: Path, **other: Any) -> Any:
    """Write the checkpoint `name` of `MODELS` into a directory; return transformers' model of it.

    `other` fields of the configuration change no weight.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    config = their_config(name, **other)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config).eval()
    randomise(model, name)
    model.save_pretrained(directory)
    return model


def randomise(model: Any, name: str) -> None:
    """Give a model of the family of `name` in `MODELS` random weights, always the same."""
    generator = torch.Generator().manual_seed(7)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            of_norm = any(part in parameter_name for part in ("norm", "ln_"))
            of_norm &= not _adds_one(name, parameter_name)
            centre = 1.0 if of_norm and parameter_name.endswith("weight") else 0.0
            parameter.data.normal_(centre, 0.1, generator=generator)
        else:  # softmaxes are far from uniform
            parameter.data.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5, generator=generator)
    model.tie_weights()
