"""Small GGUF files of every architecture and type, written by the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALIKE = "The capital of France is Paris.\n\nIt's 12 o'clock, isn't it? I'll pay 1234.50 for x = (a+b)*2;  ok\r\n\ttabs"
TEXTS = (ALIKE, "naïve café, 中文字符 и кириллица 🙂🚀", "<|im_start|>user\nHi <b>there</b><|im_end|>\n", "  lead", "")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 256, 512, 2, 4, 2, 64
QWEN3_HEAD_SIZE = 128
"""The one that transformers gives every Qwen3 that it reads from GGUF."""
_SCALES = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}
"""The places of a block's float16 scales, in the types that the gguf package reads but does not write."""


@cache
def vocabulary() -> tuple[list[str], list[str]]:
    """Return the tokens and merges of byte-level BPE, learned from the texts above."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *TEXTS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def quantised(values: np.ndarray, kind: str) -> np.ndarray:
    """Rows of bytes in a type; those that the package cannot write are random blocks with small scales."""
    if kind not in _SCALES:
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.size // elements, size), dtype=np.uint8)
    place = _SCALES[kind]
    scales = random.uniform(1e-4, 3e-4, (len(blocks), (place.stop - place.start) // 2)).astype(np.float16)
    blocks[:, place] = scales.view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def tensors(architecture: str, *, tied: bool, biased: bool, vocab_size: int) -> dict[str, np.ndarray]:
    """Random values by GGUF name, [out, in]."""
    random = np.random.default_rng(11)
    head_size = QWEN3_HEAD_SIZE if architecture == "qwen3" else HEAD_SIZE
    width, kv_width = HEADS * head_size, KV_HEADS * head_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,), "attn_q.weight": (width, HIDDEN), "attn_k.weight": (kv_width, HIDDEN),
            "attn_v.weight": (kv_width, HIDDEN), "attn_output.weight": (HIDDEN, width), "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN), "ffn_up.weight": (INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER),
        }  # fmt: skip
        if biased:
            block |= {"attn_q.bias": (width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
        if biased and architecture == "llama":
            block["attn_output.bias"] = (HIDDEN,)
        if architecture == "starcoder2":
            del block["ffn_gate.weight"]
            block |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in block.items()}
        if architecture == "qwen3":
            block |= {"attn_q_norm.weight": (head_size,), "attn_k_norm.weight": (head_size,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (HIDDEN,)
    if architecture == "starcoder2":
        shapes["output_norm.bias"] = (HIDDEN,)
    if not tied:
        shapes["output.weight"] = (vocab_size, HIDDEN)
    made = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        made[name] = 1 + 0.1 * values if name.endswith("norm.weight") else 0.06 * values
    return made


def write(
    path: Path,
    *,
    architecture: str = "llama",
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    tied: bool = False,
    biased: bool | None = None,
    pre: str | None = "gpt-2",
    changes: Mapping[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    tokens: list[str] | None = None,
) -> Path:
    """Write a file and return its path. `changes` replaces metadata (keys may lack the architecture's name).

    `kind` is the type of all matrices, `kinds` of those whose name ends with a key.
    """
    words, merges = vocabulary()
    words = words if tokens is None else tokens
    writer = gguf.GGUFWriter(path, architecture)
    metadata: dict[str, Any] = {
        "block_count": LAYERS, "context_length": 1024, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if word in SPECIAL else 1 for word in words],
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    if architecture == "qwen3":
        metadata |= {"attention.key_length": QWEN3_HEAD_SIZE, "attention.value_length": QWEN3_HEAD_SIZE}
    elif architecture != "qwen2":
        metadata["rope.dimension_count"] = HEAD_SIZE
    if architecture == "starcoder2":
        metadata["attention.layer_norm_epsilon"] = metadata.pop("attention.layer_norm_rms_epsilon")
    for key, value in (metadata | dict(changes or {})).items():
        if value is not None and key not in absent:
            _add(writer, key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}", value)
    biased = architecture == "qwen2" if biased is None else biased
    weights = tensors(architecture, tied=tied, biased=biased, vocab_size=len(vocabulary()[0]))
    for name, values in {**weights, **(extra or {})}.items():
        if name in absent:
            continue
        own = next((given for end, given in (kinds or {}).items() if name.endswith(end)), kind)
        if values.ndim == 2 and own != "F32" and name not in (extra or {}):
            writer.add_tensor(name, quantised(values, own), raw_dtype=gguf.GGMLQuantizationType[own])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
