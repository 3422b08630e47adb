"""The tokenizer that goes into an engine: it must load, and must not name tokens that the model does not have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvc_trt.errors import InputError
from kvc_trt.files.held import HeldFile
from kvc_trt.files.inputs import read_input
from kvc_trt.models.sources.containment import contained
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.sizes import readable_size

TOKENIZER_FILES = {
    "tokenizer.json": 128 << 20,
    "tokenizer_config.json": 16 << 20,
    "special_tokens_map.json": 1 << 20,
    "chat_template.jinja": 1 << 20,
    "generation_config.json": 1 << 20,
}
"""Files that an engine copies from a model besides its weights, and the most bytes of each: the text that its tokens
stand for, the prompt that a conversation becomes, and the tokens that end an answer."""


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the files of `TOKENIZER_FILES` that exist in a checkpoint; InputError for one that is too large or leads
    away."""
    found = [contained(directory, name) for name in TOKENIZER_FILES if os.path.exists(directory / name)]
    for path in found:
        check_size(path.name, path.stat().st_size, str(path))
    return found


def check_size(name: str, size: int, where: str) -> None:
    """Raise InputError, which opens with `where`, for one of `TOKENIZER_FILES` with more bytes than it may have."""
    largest = TOKENIZER_FILES[name]
    if size > largest:
        raise InputError(f"{where}: {readable_size(size)}, expected at most {readable_size(largest)}")


def check_tokenizer(files: Sequence[Path], vocab_size: int) -> None:
    """Load tokenizer.json, if it is among `files`; InputError when it is malformed or does not fit the model."""
    path = next((path for path in files if path.name == "tokenizer.json"), None)
    if path is None:
        return
    largest = max(read_tokenizer(path).get_vocab().values())
    if largest >= vocab_size:
        raise InputError(
            f"{path} does not belong to this model: it has token ids up to {largest}, vocab_size is {vocab_size}"
        )


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json; InputError when it is malformed, has no tokens, or fails when it is tried."""
    return Tokenizer(read_input(path, TOKENIZER_FILES["tokenizer.json"]), str(path))


def held_tokenizer(file: HeldFile) -> Tokenizer:
    """The tokenizer of a tokenizer.json that is held; otherwise like `read_tokenizer`."""
    return Tokenizer(file.read(TOKENIZER_FILES["tokenizer.json"]), str(file.path))


def load_tokenizer(file: HeldFile | None) -> Tokenizer | None:
    """Return the tokenizer in a tokenizer.json; None without a file."""
    return None if file is None else held_tokenizer(file)
