"""The formats of a checkpoint: a Hugging Face directory, or one GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.sources.hugging_face import read_config

if TYPE_CHECKING:
    from kvc_trt.models.gguf.checkpoint import GgufCheckpoint

AnyCheckpoint: TypeAlias = "Checkpoint | GgufCheckpoint"
GGUF_SUFFIX = ".gguf"


def is_path(model: str) -> bool:
    """True if `--model` names a checkpoint rather than a preset: by a path, a directory or the suffix .gguf."""
    return os.sep in model or model.endswith(GGUF_SUFFIX) or os.path.isdir(model)


def is_file(path: Path) -> bool:
    """True if the checkpoint is one GGUF file: what is there decides, and the suffix where nothing is."""
    return os.path.isfile(path) or (path.suffix == GGUF_SUFFIX and not os.path.isdir(path))


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """Open a checkpoint of either format; InputError where it is damaged, or neither."""
    if is_file(path):
        from kvc_trt.models.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    return Checkpoint(path)


def read_model_config(path: Path) -> ModelConfig:
    """The configuration alone; a directory needs no weights for it."""
    if is_file(path):
        checkpoint = open_checkpoint(path)
        checkpoint.close()
        return checkpoint.config

    return read_config(path)
