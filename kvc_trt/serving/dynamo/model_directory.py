"""The directory from which Dynamo's frontend reads a model, in Hugging Face's layout, made of an engine's files.

The frontend tokenises, renders the chat template and finds stop strings itself. An engine directory has the files for
that under other names, and its config.json is TensorRT-LLM's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_whole
from kvc_trt.files.inputs import parsed_json
from kvc_trt.models.sources.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

TEMPLATE_FILE = "chat_template.jinja"
MODEL_TYPE = "kvc_trt"
"""The `model_type` of config.json, which Dynamo requires but does not look up."""


def check_servable(engine: EngineDirectory) -> None:
    """Raise InputError for an engine without a tokenizer, which the frontend needs."""
    if engine.tokenizer_file is None:
        raise InputError(
            f"{engine.path} has no tokenizer, and Dynamo's frontend reads text",
            hint="build it from a checkpoint with tokenizer.json; Engine.scheduler in Python answers token ids",
        )


def write_model_directory(engine: EngineDirectory, directory: Path) -> None:
    """Write the model directory of a checked engine into an existing directory, which may be in use already.

    If the engine has no chat template, an old one is removed: such a model is registered for completions alone.
    """
    check_servable(engine)
    ends = {"eos_token_id": sorted(engine.model.eos_token_ids)}
    if engine.model.bos_token_id is not None:
        ends["bos_token_id"] = engine.model.bos_token_id  # type: ignore[assignment]
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [engine.model.architecture],
        "vocab_size": engine.model.vocab_size,
        "max_position_embeddings": engine.parameters.max_sequence_len,
        **ends,
    }
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", ends)
    # A tokenizer.json's settings of truncation and padding were meant for training.
    tokenizer = _read(engine, "tokenizer.json")
    _write(directory / "tokenizer.json", {**tokenizer, "truncation": None, "padding": None})
    # The frontend would take the template, and a length, from here.
    settings = _read(engine, "tokenizer_config.json")
    for name in ("chat_template", "model_max_length"):
        settings.pop(name, None)
    _write(directory / "tokenizer_config.json", settings)
    template = engine.chat_template
    if template is None:
        (directory / TEMPLATE_FILE).unlink(missing_ok=True)
    else:
        write_whole(directory / TEMPLATE_FILE, template.template.encode())


def start_tokens(engine: EngineDirectory) -> tuple[int, ...]:
    """Return the start tokens that a worker adds to a prompt that does not begin with them; often none.

    The frontend never adds a model's start tokens. A chat template that begins with them writes them itself, so a
    prompt without them must be a completion, and the worker adds them. If the template leaves them out, chats and
    completions look alike, and neither gets any.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return ()
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    count = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    start = tuple(whole[:count])
    if not start or engine.chat_template is None:
        return start
    rendered = engine.chat_template.render([{"role": "user", "content": "a"}])
    opening = tokenizer.encode(rendered, add_special_tokens=False).ids[: len(start)]
    return start if tuple(opening) == start else ()


def _read(engine: EngineDirectory, name: str) -> dict[str, Any]:
    """Return the content of one of the engine's tokenizer files; empty if it does not exist."""
    file = engine.tokenizer_files.get(name)
    if file is None:
        return {}
    value = parsed_json(file.read(TOKENIZER_FILES[name]), file.path)
    if not isinstance(value, dict):
        raise InputError(f"{file.path}: expected a JSON object")
    return value


def _write(path: Path, document: dict[str, Any]) -> None:
    write_whole(path, json.dumps(document, ensure_ascii=False).encode())
