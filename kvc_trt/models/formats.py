"""The formats of a checkpoint: a Hugging Face directory, or one GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import family
from kvc_trt.models.family_weights import in_our_order
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.sources.fp8 import as_floats
from kvc_trt.models.sources.hub import is_repository
from kvc_trt.models.sources.hugging_face import read_config
from kvc_trt.models.weights import WeightSource

if TYPE_CHECKING:
    from kvc_trt.models.gguf.checkpoint import GgufCheckpoint

AnyCheckpoint: TypeAlias = "Checkpoint | GgufCheckpoint"
GGUF_SUFFIX = ".gguf"


def is_path(model: str) -> bool:
    """True if `--model` is a path: one that exists, or what is neither a preset's name nor a repository of the Hub."""
    return os.path.exists(model) or model.endswith(GGUF_SUFFIX) or (os.sep in model and not is_repository(model))


def is_file(path: Path) -> bool:
    """True if the checkpoint is one GGUF file: what is there decides, and the suffix where nothing is."""
    return os.path.isfile(path) or (path.suffix == GGUF_SUFFIX and not os.path.isdir(path))


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """Open a checkpoint of either format; InputError where it is damaged, or neither."""
    if is_file(path):
        from kvc_trt.models.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    return Checkpoint(path)


def weights_of(checkpoint: AnyCheckpoint) -> WeightSource:
    """Return a checkpoint's weights as floats, under the names and in the order that all parts of kvc-trt know."""
    floats = as_floats(checkpoint)
    if not isinstance(checkpoint, Checkpoint):
        return floats  # a GGUF file's tensors have those names already
    config, own = checkpoint.config, family(checkpoint.config.architecture)
    places = None if own.weights is None else own.weights(config)
    return in_our_order(floats, config, places, interleaved=own.interleaved)


def read_model_config(path: Path) -> tuple[ModelConfig, bool]:
    """The configuration, and whether an engine holds the blocks of the file; a directory needs no weights for it."""
    if is_file(path):
        from kvc_trt.models.gguf.checkpoint import GgufCheckpoint

        checkpoint = GgufCheckpoint(path)
        checkpoint.close()
        return checkpoint.config, checkpoint.keeps_its_blocks
    return read_config(path), False
