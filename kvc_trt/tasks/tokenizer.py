"""The tokenizer that sizes a data set, and the check that it can spell the answers."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.files.held import HeldFile
from kvc_trt.models.formats import GGUF_SUFFIX
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.models.sources.hugging_face import read_json_object
from kvc_trt.models.sources.tokenizer import held_tokenizer, read_tokenizer
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.tasks.task import TaskSample


@dataclass(frozen=True)
class TaskTokenizer:
    """A tokenizer, its identity, and the number of positions of its model."""

    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 of tokenizer.json."""
    positions: int | None = None
    """The model's positions; None where nothing says how many."""

    @property
    def vocabulary_size(self) -> int:
        """Return the size of the vocabulary: one more than the largest token id."""
        return 1 + int(max(self.tokenizer.get_vocab().values()))

    def encode(self, text: str) -> list[int]:
        """The token ids of a whole prompt."""
        return list(self.tokenizer.encode(text).ids)

    def require_positions(self, task: str, target_tokens: int) -> None:
        """InputError where the target is longer than the model's positions, if they are known."""
        if self.positions is not None and target_tokens > self.positions:
            raise InputError(
                f"{task}: the target is {target_tokens} tokens, the model has {self.positions} positions",
                hint=f"use a target of at most {self.positions} tokens",
            )

    def unknown_word(self, text: str) -> str | None:
        """The first piece of a text that becomes the unknown token, if there is one."""
        encoding, unknown = self.tokenizer.encode(text), unknown_id(self.tokenizer)
        if unknown is None or unknown not in encoding.ids:
            return None
        first, last = encoding.offsets[encoding.ids.index(unknown)]
        return text[first:last]

    def check_spelling(self, sample: TaskSample) -> None:
        """InputError for a word of the prompt that becomes the unknown token, or an answer that does not come back.

        Such a sample cannot be answered, whatever the cache keeps.
        """
        if (word := self.unknown_word(sample.prompt)) is not None:
            raise _cannot_spell(sample.task, f"{word!r} is an unknown token")
        for answer in sample.answers:
            ids = self.tokenizer.encode(answer, add_special_tokens=False).ids
            returned = self.tokenizer.decode(ids)
            if answer.lower() not in returned.lower():
                raise _cannot_spell(sample.task, f"the answer {answer!r} comes back as {returned!r}")


def load_task_tokenizer(source: str) -> TaskTokenizer:
    """The tokenizer of a preset whose checkpoint is here, of a directory (checkpoint or engine), or of a file.

    A file is a tokenizer.json or a GGUF file. InputError where there is no tokenizer, or it is malformed or empty.
    """
    path = Path(source) if os.path.exists(source) else _of_preset(source)
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return _from_gguf(path)
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer/tokenizer.json") if os.path.isfile(path / name)]
        if not found:
            raise InputError(f"{path} has no tokenizer.json")
        file, positions = found[0], _positions(path / "config.json")
    else:
        file, positions = path, None
    return _task_tokenizer(read_tokenizer(file), positions)


def task_tokenizer_of(file: HeldFile) -> TaskTokenizer:
    """The tokenizer of an engine's tokenizer.json; InputError where it is malformed."""
    return _task_tokenizer(held_tokenizer(file), None)


def _from_gguf(path: Path) -> TaskTokenizer:
    checkpoint = GgufCheckpoint(path)
    checkpoint.close()
    content = checkpoint.tokenizer_contents()["tokenizer.json"]
    return _task_tokenizer(Tokenizer(content, str(path)), checkpoint.config.max_position_embeddings)


def _task_tokenizer(tokenizer: Tokenizer, positions: int | None) -> TaskTokenizer:
    return TaskTokenizer(tokenizer, hashlib.sha256(tokenizer.to_str().encode()).hexdigest(), positions)


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id of text that the vocabulary lacks; None where every text has tokens.

    InputError for a file that the library reads although it is not JSON.
    """
    try:
        model = json.loads(tokenizer.to_str())["model"]
    except ValueError as error:
        raise InputError(f"the tokenizer's file is not JSON: {error}") from error
    token = model.get("unk_token")
    found: int | None = model.get("unk_id") if token is None else tokenizer.token_to_id(token)
    return found


def _of_preset(name: str) -> Path:
    if name not in (known := list_presets()):
        raise InputError(
            f"{name} is neither a file, a directory nor a preset{did_you_mean(name.lower(), known)}",
            hint="give a tokenizer.json, a Hugging Face directory, an engine or a preset (kvc-trt models)",
        )
    preset = load_preset(name)
    if preset.file is not None:
        return preset.file.found(name)
    if preset.checkpoint is None:
        raise InputError(
            f"preset {name} ships no tokenizer", hint="give the directory of its checkpoint, or its tokenizer.json"
        )
    return preset.checkpoint


def _positions(config: Path) -> int | None:
    """`max_position_embeddings` of a checkpoint's or an engine's config.json, if it says."""
    if not os.path.isfile(config):
        return None
    content = read_json_object(config)
    described: Any = content.get("pretrained_config", content)
    positions = described.get("max_position_embeddings") if isinstance(described, dict) else None
    return positions if isinstance(positions, int) else None


def _cannot_spell(task: str, how: str) -> InputError:
    return InputError(
        f"{task}: the tokenizer cannot spell this task: {how}",
        hint="kvc-trt tasks lists others; two-records has the words of retrieval-tiny",
    )
