"""The description of a model: config.json and generation_config.json of a Hugging Face directory, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig, check_length
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.pretrained_config import from_pretrained_config, to_pretrained_config
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.hugging_face import read_config
from kvc_trt.models.weights import check_weights, count_parameters
from tests.conftest import TINY_MODEL
from tests.fuzz.kind import SAME, Comparison, Kind
from tests.fuzz.mutation.gguf_tree import GGUF
from tests.fuzz.mutation.raw import RAW
from tests.fuzz.mutation.trees import JSON, of_trees

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 256}  # fmt: skip
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_scaling": _LLAMA3, "head_dim": 16},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
    {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False, "attention_bias": True},
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "eos_token_id": [1, 2]},
    {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "tie_word_embeddings": True},
    {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
)


_MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
                "Qwen3ForCausalLM": "qwen3"}  # fmt: skip


class HuggingFaceConfig(Kind):
    name = "hf-config"
    mutators = (*RAW, *[of_trees(JSON)] * 12)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self._classes = {architecture: CONFIG_MAPPING[named] for architecture, named in _MODEL_TYPES.items()}

    def seeds(self) -> Sequence[bytes]:
        return [json.dumps({**TINY_MODEL, **change}).encode() for change in _VARIANTS]

    def specimens(self) -> Sequence[bytes]:
        return [
            b"[" * 100_000,
            b'{"a":' * 100_000,
            json.dumps({**TINY_MODEL, "eos_token_id": list(range(100_000))}).encode(),
            json.dumps({**TINY_MODEL, "quantization_config": [[[{"a" * 1000: 1}]]]}).encode(),
            b'{"vocab_size": ' + b"9" * 900_000 + b"}",
            b'{"vocab_size": 1, "vocab_size": 2}',
            json.dumps({**TINY_MODEL, "architectures": ["\x1b]0;" + "A" * 100_000]}).encode(),
        ]

    def read(self, content: bytes) -> ModelConfig:
        self.file(content, "config.json")
        config = read_config(self.folder)
        check_length(config, 32, 8)
        count_parameters(config)
        RandomWeights(config, 0).names() if config.num_hidden_layers <= 64 else None
        assert from_pretrained_config(to_pretrained_config(config), "an engine") == config
        return config

    def compared(self, content: bytes, found: ModelConfig) -> Comparison:
        """Compare with transformers: the same sizes, for the class that `model_type` names."""
        mapping = json.loads(content)
        if mapping.get("model_type") != _MODEL_TYPES[found.architecture]:
            return Comparison(False, refused="model_type names another class; ours goes by the architecture")
        try:
            theirs = self._classes[found.architecture].from_dict(mapping)
        except Exception as error:  # whatever it raises is a refusal
            return Comparison(False, refused=f"{type(error).__name__} of transformers: {str(error)[:40]}")
        ours = {
            "hidden_size": found.hidden_size, "intermediate_size": found.intermediate_size,
            "vocab_size": found.vocab_size, "num_hidden_layers": found.num_hidden_layers,
            "num_attention_heads": found.num_attention_heads, "num_key_value_heads": found.num_key_value_heads,
            "max_position_embeddings": found.max_position_embeddings, "rms_norm_eps": found.norm_epsilon,
            "tie_word_embeddings": found.tie_word_embeddings,
        }  # fmt: skip
        head_size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        if head_size != found.head_size:
            return Comparison(False, difference=f"head size of {theirs.model_type}")
        base = (theirs.rope_parameters or {}).get("rope_theta")
        if base is None:  # a null: ours takes the default, and a model of transformers cannot be made
            return Comparison(False, refused="no rotary base")
        if base != found.rotary_base:
            return Comparison(False, difference=f"rotary base of {theirs.model_type}")
        for name, value in ours.items():
            if getattr(theirs, name, None) != value:
                return Comparison(False, difference=f"{name} of {theirs.model_type}")
        return SAME


class GenerationConfig(Kind):
    """generation_config.json beside a valid config.json."""

    name = "generation-config"
    mutators = HuggingFaceConfig.mutators

    def seeds(self) -> Sequence[bytes]:
        return [json.dumps(value).encode() for value in ({"eos_token_id": 3}, {"eos_token_id": [3, 4]}, {})]

    def specimens(self) -> Sequence[bytes]:
        return [json.dumps({"eos_token_id": list(range(200_000))}).encode()]

    def read(self, content: bytes) -> ModelConfig:
        (self.folder / "config.json").write_text(json.dumps(TINY_MODEL))
        self.file(content, "generation_config.json")
        return read_config(self.folder)


_WITH_EXPERTS: dict[str, Any] = {
    "tied": True,
    "changes": {"expert_count": 2, "expert_used_count": 1},
    "absent": tuple(f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down")),
    "extra": {
        "blk.0.ffn_gate_inp.weight": np.full((2, 32), 0.1, np.float32),
        **{f"blk.0.ffn_{name}_exps.weight": np.full((2, 32, 32), 0.1, np.float32) for name in ("gate", "up", "down")},
    },
}
_PIECES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.scores": [-float(rank) for rank in range(340)],
}
_WITH_SCORES: dict[str, Any] = {
    "pre": None,
    "absent": (*_WITH_EXPERTS["absent"], "tokenizer.ggml.merges"),
    "changes": {**_WITH_EXPERTS["changes"], **_PIECES},
}


class Gguf(Kind):
    name = "gguf"
    mutators = (*RAW, *[of_trees(GGUF)] * 10)

    def seeds(self) -> Sequence[bytes]:
        from tests.models.gguf import tiny

        small = {"HIDDEN": 32, "INNER": 32, "LAYERS": 1, "HEADS": 2, "KV_HEADS": 1, "HEAD_SIZE": 16}
        of_blocks = {**small, "HIDDEN": 256, "INNER": 256, "HEADS": 1, "HEAD_SIZE": 256}
        lots: list[tuple[dict[str, int], dict[str, Any]]] = [
            (small, {"tied": True}),
            (small, {"tied": True, "kind": "Q4_0"}),
            (small, {"tied": True, "kind": "Q8_0", "architecture": "qwen2"}),
            (
                small,
                {"tied": True, "kind": "BF16", "changes": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}},
            ),
            (of_blocks, {"tied": True, "kind": "Q4_K"}),
            (small, _WITH_EXPERTS | _WITH_SCORES),
        ]
        found = []
        for number, (sizes, options) in enumerate(lots):
            with patch.multiple(tiny, **sizes):
                found.append(tiny.write(self.folder / f"seed-{number}.gguf", **options).read_bytes())
        return [*found, *self._of_later_families()]

    def _of_later_families(self) -> Sequence[bytes]:
        """Linear layers with one for later tokens, and experts in MXFP4."""
        from tests.oracles.family_models import written
        from tests.oracles.gguf_files import write_gguf

        experts: dict[str, Any] = {"kind": "Q8_0", "others": {"_exps": "MXFP4"}}
        linear: dict[str, Any] = {"kind": "Q8_0", "keys": {"block_count": 5, "nextn_predict_layers": 1}}
        found = []
        for name, options in {"gpt-oss": experts, "qwen3.5": linear}.items():
            directory = self.folder / name
            written(name, directory, **({"swiglu_limit": 7.0} if name == "gpt-oss" else {"linear_value_head_dim": 32}))
            found.append(write_gguf(directory, self.folder / f"{name}.gguf", **options).read_bytes())
        return found

    def specimens(self) -> Sequence[bytes]:
        head = b"GGUF" + (3).to_bytes(4, "little")
        many = (1 << 40).to_bytes(8, "little")
        return [
            head,
            head + many + many,
            head + bytes(8) + (1).to_bytes(8, "little") + many,
            head + bytes(8) + (1).to_bytes(8, "little") + _array_in_array(5000),
        ]

    def read(self, content: bytes) -> GgufCheckpoint:
        checkpoint = GgufCheckpoint(self.file(content, "model.gguf"))
        try:
            _ = checkpoint.keeps_its_blocks  # asked before any shape is checked
            check_weights(checkpoint.config, checkpoint)
            for name in checkpoint.names():
                checkpoint.read(name)
                if _is_kept(checkpoint, name):
                    checkpoint.read_blocks(name, 0, 1)
            checkpoint.tokenizer_contents()
            checkpoint.fingerprint()
        finally:
            checkpoint.close()
        return checkpoint

    def compared(self, content: bytes, found: GgufCheckpoint) -> Comparison:
        """Compare with the gguf package: the same tensors with the same types, shapes and bytes."""
        import gguf

        try:
            theirs = gguf.GGUFReader(self.folder / "model.gguf").tensors
        except Exception as error:  # whatever it raises is a refusal
            return Comparison(False, refused=f"{type(error).__name__}: {str(error)[:50]}")
        ours = found.header.tensors
        if [tensor.name for tensor in theirs] != list(ours):
            return Comparison(False, difference="names")
        for tensor in theirs:
            mine = ours[tensor.name]
            if tensor.tensor_type.name != mine.type:
                return Comparison(False, difference="type")
            if tuple(int(size) for size in tensor.shape)[::-1] != mine.shape:
                return Comparison(False, difference="shape")
            stored = content[mine.offset : mine.offset + mine.nbytes]
            if np.ascontiguousarray(tensor.data).tobytes() != stored:
                return Comparison(False, difference="bytes")
        return SAME


def _is_kept(checkpoint: GgufCheckpoint, name: str) -> bool:
    """True if an engine can hold the tensor's blocks."""
    try:
        return checkpoint.block_bits(name) is not None
    except InputError:
        return False


def _array_in_array(depth: int) -> bytes:
    one = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    return (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little") + one * depth


KINDS = (HuggingFaceConfig, GenerationConfig, Gguf)
