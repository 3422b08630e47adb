"""The tokenizer that goes into an engine: it must load, and must not name tokens that the model does not have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.models.sources.containment import contained
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
    """Those of `TOKENIZER_FILES` that exist in a checkpoint; InputError for one that is too large or leads away."""
    found = [contained(directory, name) for name in TOKENIZER_FILES if (directory / name).exists()]
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
    largest = max(read_tokenizer(path).get_vocab(with_added_tokens=True).values())
    if largest >= vocab_size:
        raise InputError(
            f"{path} does not belong to this model: it has token ids up to {largest}, vocab_size is {vocab_size}"
        )


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json; InputError when it is malformed or has no tokens."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with a file
        raise InputError(f"{path} is not a tokenizer: {' '.join(str(error).split())}") from error
    if not tokenizer.get_vocab(with_added_tokens=True):
        raise InputError(f"{path} has an empty vocabulary")
    return tokenizer
