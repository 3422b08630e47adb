"""The checkpoint folder: what `transformers` and kvc-trt read, written from a trained model and the word list."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from kvc_trt.tasks.kinds.key_value import BOS, END, PAD, UNKNOWN, WORDS
from training.retrieval_tiny.model import ModelShape, SmallLlama

WEIGHTS_FILE = "model.safetensors"


def save_checkpoint(model: SmallLlama, tokenizer: Tokenizer, directory: Path) -> None:
    """Write weights, tokenizer and configuration files; the model card beside them is written by hand."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    special_ids: dict[str, object] = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD}
    _write_json(directory / "config.json", _model_config(model.shape) | special_ids)
    _write_json(directory / "generation_config.json", special_ids | {"do_sample": False})
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(model.shape))


def load_model(directory: Path) -> SmallLlama:
    """The trained model of a checkpoint folder, in evaluation mode."""
    config = json.loads((directory / "config.json").read_text())
    model = SmallLlama(ModelShape(**{name: config[name] for name in ModelShape.__dataclass_fields__}))
    model.load_state_dict(load_file(directory / WEIGHTS_FILE))
    return model.eval()


def build_tokenizer() -> Tokenizer:
    """One token per word. `<record>` and `<query>` are ordinary words, so that decoding a prompt keeps them."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[UNKNOWN]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single=f"{WORDS[BOS]} $A", special_tokens=[(WORDS[BOS], BOS)])
    tokenizer.add_special_tokens([AddedToken(WORDS[i], special=True) for i in (PAD, BOS, END, UNKNOWN)])
    return tokenizer


def _model_config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _tokenizer_config(shape: ModelShape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": WORDS[PAD],
        "bos_token": WORDS[BOS],
        "eos_token": WORDS[END],
        "unk_token": WORDS[UNKNOWN],
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
