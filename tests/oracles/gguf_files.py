"""A checkpoint of transformers as a GGUF file, with what llama.cpp's converter does to each family's tensors.

Names of tensors are those of the gguf package, which llama.cpp's converter uses too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "Phi3": "phi3", "Gemma2": "gemma2", "Gemma3": "gemma3", "Olmo": "olmo", "Olmo2": "olmo2", "Olmo3": "olmo2",
    "Granite": "granite", "Cohere": "command-r", "Cohere2": "cohere2", "Falcon": "falcon", "GPTNeoX": "gptneox",
    "Glm4": "glm4", "GptOss": "gpt-oss", "Qwen2Moe": "qwen2moe", "Qwen3Moe": "qwen3moe", "Mixtral": "llama",
    "SmolLM3": "smollm3", "Qwen2": "qwen2", "Qwen3Next": "qwen3next", "Qwen3_5": "qwen35", "Qwen3_5Moe": "qwen35moe",
    "Mistral": "mistral", "Glm": "chatglm",
}  # fmt: skip
"""Prefix of transformers' class -> `general.architecture`."""
_INTERLEAVED = ("Olmo", "Granite", "Mistral", "Mixtral", "SmolLM3")
"""Families whose queries and keys the converter brings into the order of neighbouring pairs."""
_ALWAYS_FLOATS = re.compile(r"\.ffn_gate_inp|\.ssm_conv1d|\.bias$")
_WITH_LINEAR_LAYERS = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_MATRICES = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
_FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")


def write_gguf(
    directory: Path,
    path: Path,
    *,
    kind: str = "F32",
    others: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
    keys: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray] | None = None,
    first_converter: bool = False,
    tensors_of_a_part: int = 0,
    small_first_part: bool = False,
    less: tuple[str, ...] = (),
    vectors: str | None = None,
    architecture: str | None = None,
) -> Path:
    """Write the checkpoint in `directory` as the file `path`, its matrices in a type; return the path.

    If parts have a number of tensors, the files are those of the gguf package beside the path; a small first one has
    none. `less` names tensors that are left out, and `vectors` another type of theirs; `architecture` is one
    that is not in `ARCHITECTURES`.

    `others` has the type of matrices with a part in their names. `without` names keys, without the architecture's
    name, that are left out; `keys` has others, and `more` tensors besides the checkpoint's. The first converter of
    Qwen3-Next did not take its matrices of queries, keys, values and gates apart.
    """
    config = json.loads((directory / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM")
    architecture = architecture or ARCHITECTURES[family]
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=tensors_of_a_part, small_first_shard=small_first_part
    )
    own_keys = _FAMILY_KEYS.get(family, lambda _config: {})(config)
    for key, value in (_keys(config) | own_keys | dict(keys or {})).items():
        if value is not None and key not in without:
            _add(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, config)
    llama = gguf.MODEL_ARCH.LLAMA  # whose names the tensors of Mistral have
    number = next((one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), llama)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    stored = load_file(directory / "model.safetensors")
    joined = {name: stored.pop(name) for name in list(stored) if first_converter and ".in_proj_qkvz." in name}
    for name, values in (_tensors(family, config, stored) | joined | dict(more or {})).items():
        theirs = name if name.startswith(("blk.", "rope_")) else names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        if theirs in less:
            continue
        own = vectors or next((other for part, other in (others or {}).items() if part in theirs), kind)
        if vectors is not None and theirs != "output_norm.weight":
            own = "F32"
        if own != "F32" and (vectors is not None or (values.ndim > 1 and not _ALWAYS_FLOATS.search(theirs))):
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType[own])
            writer.add_tensor(theirs, blocks, raw_dtype=gguf.GGMLQuantizationType[own])
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(values.squeeze()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the converter writes of every family."""
    rotary = config.get("rope_parameters") or {}
    full = rotary.get("full_attention", rotary)
    found = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads"), "rope.freq_base": full.get("rope_theta"),
        "rope.freq_base_swa": rotary.get("sliding_attention", {}).get("rope_theta"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", config.get("layer_norm_epsilon")),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "attention.key_length": config.get("head_dim"), "attention.value_length": config.get("head_dim"),
    }  # fmt: skip
    if full.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
    if full.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": full.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": full.get("beta_fast"), "rope.scaling.yarn_beta_slow": full.get("beta_slow"),
        }  # fmt: skip
    return found


def _rotary_channels(config: Mapping[str, Any]) -> int:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary = config.get("rope_parameters") or {}
    return int(size * rotary.get("partial_rotary_factor", 1.0))


def _of_phi3(config: Mapping[str, Any]) -> dict[str, Any]:
    rotary, longest = config["rope_parameters"], config["max_position_embeddings"]
    original = config["original_max_position_embeddings"]
    found = {
        "rope.dimension_count": _rotary_channels(config), "attention.sliding_window": config["sliding_window"] or 0,
        "rope.scaling.original_context_length": original, "attention.key_length": None,
        "attention.value_length": None,
    }  # fmt: skip
    if "long_factor" in rotary:
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(longest / original) / np.log(original)))
    return found


def _of_gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": _slides(config)}


def _of_gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    caps = {name: config[name] for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {"attention.sliding_window": config["sliding_window"], **caps}


def _of_olmo3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what earlier converters wrote; later ones write the keys of all families."""
    return {
        "attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": _slides(config),
        "rope.scaling.attn_factor": config["rope_parameters"]["full_attention"].get("attention_factor"),
        "rope.scaling.yarn_attn_factor": None, "rope.scaling.yarn_beta_fast": None, "rope.scaling.yarn_beta_slow": None,
    }  # fmt: skip


def _of_gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"],
            "expert_feed_forward_length": config["intermediate_size"]}  # fmt: skip


def _of_linear_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"], "full_attention_interval": 4,
        "rope.dimension_count": _rotary_channels(config),
    } | (_of_experts(config) if "moe_intermediate_size" in config else {})  # fmt: skip


def _slides(config: Mapping[str, Any]) -> list[bool]:
    return [kind == "sliding_attention" for kind in config["layer_types"]]


def _of_granite(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"], "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"], "logit_scale": config["logits_scaling"],
        "vocab_size": config["vocab_size"], "rope.dimension_count": _rotary_channels(config),
        "attention.key_length": None, "attention.value_length": None,
    }  # fmt: skip


def _of_cohere(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}


def _of_cohere2(config: Mapping[str, Any]) -> dict[str, Any]:
    sliding = {"attention.sliding_window": config["sliding_window"], "vocab_size": config["vocab_size"]}
    return {**_of_cohere(config), **sliding, "rope.dimension_count": _rotary_channels(config)}


def _of_falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "context_length": 2048, "tensor_data_layout": "jploski", "feed_forward_length": 4 * config["hidden_size"],
        "attention.head_count_kv": _falcon_kv_heads(config),
    }  # fmt: skip


def _falcon_kv_heads(config: Mapping[str, Any]) -> int:
    return config["num_kv_heads"] if config["new_decoder_architecture"] else 1


def _of_gpt_neox(config: Mapping[str, Any]) -> dict[str, Any]:
    channels = int(config["hidden_size"] // config["num_attention_heads"] * 0.25)
    return {"use_parallel_residual": config["use_parallel_residual"], "rope.dimension_count": channels,
            "rope.freq_base": None, "attention.head_count_kv": None}  # fmt: skip


def _of_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


_FAMILY_KEYS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "Phi3": _of_phi3, "Gemma2": _of_gemma2, "Gemma3": _of_gemma3, "Olmo3": _of_olmo3, "Granite": _of_granite,
    "Mistral": lambda config: {"attention.sliding_window": config["sliding_window"]},
    "Cohere": _of_cohere, "Cohere2": _of_cohere2, "Falcon": _of_falcon, "GPTNeoX": _of_gpt_neox, "GptOss": _of_gpt_oss,
    "Qwen3Next": _of_linear_layers, "Qwen3_5": _of_linear_layers, "Qwen3_5Moe": _of_linear_layers,
    "Qwen2Moe": _of_experts, "Qwen3Moe": _of_experts, "Olmo": lambda _config: {"attention.layer_norm_epsilon": 1e-5},
    "Glm": lambda config: {"rope.dimension_count": _rotary_channels(config), "attention.key_length": None,
                           "attention.value_length": None},
    "Glm4": lambda config: {"rope.dimension_count": _rotary_channels(config)},
    "SmolLM3": lambda config: {"rope.dimension_count": _rotary_channels(config), "vocab_size": config["vocab_size"]},
    "Mixtral": lambda config: {"rope.dimension_count": _rotary_channels(config), "vocab_size": config["vocab_size"]},
}  # fmt: skip


def _tensors(family: str, config: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors that the converter writes: experts stacked, rows moved, one added to Gemma's norms."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    found: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in stored}
    for name in sorted(stored, key=lambda name: numbers[name]):
        values = stored[name]
        if (match := _EXPERT.fullmatch(name)) is not None:
            layer, _, matrix = match.groups()
            experts.setdefault(f"blk.{layer}.{_EXPERT_MATRICES[matrix]}.weight", []).append(values)
        elif family == "GptOss" and (match := _FUSED.fullmatch(name)) is not None:
            found |= _apart_in_experts(values, *match.groups())
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = values
        elif ".linear_attn." in name:
            found |= _of_linear_layer(family, config, name, values)
        elif family in _INTERLEAVED and ".self_attn.q_proj." in name:
            found[name] = _in_pairs(values, heads)
        elif family in _INTERLEAVED and ".self_attn.k_proj." in name:
            found[name] = _in_pairs(values, kv_heads)
        elif "query_key_value" in name:
            groups = _falcon_kv_heads(config) if family == "Falcon" else heads
            found[name] = _apart(values, groups, config["hidden_size"] // heads)
        elif family in ("Gemma2", "Gemma3", *_WITH_LINEAR_LAYERS) and name.endswith("norm.weight"):
            found[name] = values + np.float32(1)
        elif family == "Glm" and ".self_attn.q_proj." in name:
            parts = [stored[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif family == "Glm" and re.search(r"\.self_attn\.[kv]_proj\.", name):
            continue
        elif not (config.get("tie_word_embeddings") and name == "lm_head.weight"):
            found[name] = values
    rotary = config.get("rope_parameters") or {}
    lists = {f"rope_factors_{one}.weight": rotary.get(f"{one}_factor") for one in ("long", "short")}
    return found | {name: np.stack(each) for name, each in experts.items()} | {
        name: np.array(factors, np.float32) for name, factors in lists.items() if factors
    }  # fmt: skip


def _in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Bring rows i and i + D/2 of each head side by side."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _apart(values: np.ndarray, groups: int, size: int) -> np.ndarray:
    """Bring a joined matrix, KV head by KV head, into the order of all queries, all keys, all values."""
    heads = values.reshape(groups, -1, size, *values.shape[1:])
    parts = (heads[:, :-2], heads[:, -2], heads[:, -1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _of_linear_layer(family: str, config: Mapping[str, Any], name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Bring Qwen3.5's value heads into the converter's order, and take Qwen3-Next's joined matrices apart."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, width, rows = config["linear_key_head_dim"], config["linear_value_head_dim"], heads // keys
    prefix, _, part = name.partition(".linear_attn.")
    mixed = 2 * keys * size
    if part == "in_proj_qkvz.weight":
        of_heads = np.split(values.reshape(keys, -1, values.shape[1]), np.cumsum([size, size, rows * width]), axis=1)
        query, key, value, gate = (one.reshape(-1, values.shape[1]) for one in of_heads)
        layer = prefix.rpartition(".")[2]
        return {
            f"blk.{layer}.attn_qkv.weight": np.concatenate([query, key, value]), f"blk.{layer}.attn_gate.weight": gate,
        }  # fmt: skip
    values = -np.exp(values) if part == "A_log" else values.squeeze() if part == "conv1d.weight" else values
    if family != "Qwen3Next":
        by_head = {"in_proj_z.weight": width, "in_proj_a.weight": 1, "in_proj_b.weight": 1, "A_log": 1, "dt_bias": 1}
        if part in by_head:
            values = _first_of_each_key_head_first(values, keys, by_head[part])
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            moved = _first_of_each_key_head_first(values[mixed:], keys, width)
            values = np.concatenate([values[:mixed], moved])
        elif part == "out_proj.weight":
            values = _first_of_each_key_head_first(values.T, keys, width).T
    return {name.replace(".dt_bias", ".dt_proj.bias"): values}


def _first_of_each_key_head_first(values: np.ndarray, keys: int, width: int) -> np.ndarray:
    heads = values.reshape(keys, -1, width, *values.shape[1:])
    return heads.swapaxes(0, 1).reshape(values.shape)


def _apart_in_experts(values: np.ndarray, layer: str, matrix: str, bias: str | None) -> dict[str, np.ndarray]:
    """Lay gpt-oss's matrices [experts,in,out] out as [experts,out,in], with gate and up, which alternate, apart."""
    part = "weight" if bias is None else "bias"
    rows = values if bias else values.swapaxes(1, 2)
    if matrix == "down":
        return {f"blk.{layer}.ffn_down_exps.{part}": rows}
    return {f"blk.{layer}.ffn_{name}_exps.{part}": rows[:, first::2] for first, name in enumerate(("gate", "up"))}


def _add_tokenizer(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """A vocabulary as large as the model's, of letters that no text needs."""
    tokens = [chr(0x21 + number) for number in range(config["vocab_size"] - 1)] + ["AB"]
    for key, value in {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["A B"]}.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    for name, field in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        _add(writer, f"tokenizer.ggml.{name}_token_id", config[f"{field}_token_id"])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)
