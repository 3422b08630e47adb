"""A Llama checkpoint as GGUF for llama.cpp, every matrix in one format.

    python -m benchmarks.peers.converters.llama_cpp CHECKPOINT OUTPUT.gguf F32|Q8_0|Q4_0

Runs in the peers' environment. Rows of Q and K change places, since llama.cpp rotates neighbouring channels where the
checkpoint rotates halves. The file has no vocabulary: prompts are token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def target_name(name: str) -> str:
    """Return the GGUF name of a tensor of a Llama checkpoint."""
    stem = name.removesuffix(".weight")
    if stem in _TOP_TENSORS:
        return f"{_TOP_TENSORS[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_TENSORS[part]}.weight"


def interleave_rotary_halves(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows [heads * D, in] of Q or K from rotating halves to rotating neighbours."""
    rows, width = matrix.shape
    neighbours: np.ndarray = matrix.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)
    return neighbours


def write_header(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")


def convert(checkpoint: Path, output: Path, format_name: str) -> None:
    """Write the checkpoint's one safetensors file as GGUF, one tensor in memory at a time."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kind = gguf.GGMLQuantizationType[format_name]
    writer = gguf.GGUFWriter(output, "llama", use_temp_file=True)
    write_header(writer, config)
    with safe_open(checkpoint / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            values = tensors.get_tensor(name).float().numpy()
            part = name.split(".")[-2]
            if part in heads:
                values = interleave_rotary_halves(values, heads[part])
            if values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
                writer.add_tensor(target_name(name), values)
            else:
                writer.add_tensor(target_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
