"""A checkpoint of random weights that reads text: every character from U+4E00 is a token of that distance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

FIRST = 0x4E00
WORDS = 50


def text(*ids: int) -> str:
    """Return the text of these tokens."""
    return "".join(chr(FIRST + token) for token in ids)


def with_tokenizer(model: Path, directory: Path) -> Path:
    """Return the model of a config.json as a checkpoint with weights and a tokenizer."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    from kvc_trt.models.random_weights import RandomWeights
    from kvc_trt.models.sources.hugging_face import read_config

    shutil.copytree(model, directory)
    weights = RandomWeights(read_config(directory), 0)
    save_file({name: weights.read(name) for name in weights.names()}, directory / "model.safetensors")
    vocabulary = {text(token): token for token in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=text(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def with_template(model: Path, directory: Path, **generation: object) -> Path:
    """Return the model as a chat model: token 3 opens a prompt, 4 to 6 open messages of system, user and assistant."""
    with_tokenizer(model, directory)
    template = "{{ bos_token }}{% for message in messages %}"
    template += "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    opening = {role: text(token) for token, role in enumerate(("system", "user", "assistant"), start=4)}
    template += "{{ " + repr(opening) + "[message.role] }}{{ message.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}" + opening["assistant"] + "{% endif %}"
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": text(3)}))
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
