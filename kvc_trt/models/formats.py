"""The formats of a checkpoint: a Hugging Face directory, or one GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvc_trt.models.config import ModelConfig
from kvc_trt.models.family import DType, family
from kvc_trt.models.family_weights import channel_order, in_our_order
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.sources.checkpoint import Checkpoint, has_weights
from kvc_trt.models.sources.fp8 import as_floats
from kvc_trt.models.sources.fused_experts import is_mxfp4
from kvc_trt.models.sources.hub import is_repository
from kvc_trt.models.sources.hugging_face import read_config, read_decoder_fields, states_dtype
from kvc_trt.models.sources.int4 import Int4Layout, int4_layout, unpacked
from kvc_trt.models.stacked_weights import StackedWeights
from kvc_trt.models.weights import WeightSource, expected_tensors

AnyCheckpoint: TypeAlias = "Checkpoint | GgufCheckpoint"
GGUF_SUFFIX = ".gguf"


def is_path(model: str) -> bool:
    """True if `--model` is a path: one that exists, or a name that can be neither a preset nor a repository of the
    Hub."""
    return os.path.exists(model) or model.endswith(GGUF_SUFFIX) or (os.sep in model and not is_repository(model))


def is_file(path: Path) -> bool:
    """True if the checkpoint is a GGUF file: the path's own kind decides, or its suffix if nothing exists there."""
    return os.path.isfile(path) or (path.suffix == GGUF_SUFFIX and not os.path.isdir(path))


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """Open a checkpoint of either format; InputError where it is damaged, or neither."""
    if is_file(path):
        return GgufCheckpoint(path)
    return Checkpoint(path)


def weights_of(checkpoint: AnyCheckpoint) -> WeightSource:
    """Return a checkpoint's weights as floats, under the names and in the order that all parts of kvc-trt know."""
    if not isinstance(checkpoint, Checkpoint):
        return as_floats(checkpoint)  # a GGUF file's tensors have those names already
    where = f"{checkpoint.directory / 'config.json'}: quantization_config"
    config, own = checkpoint.config, family(checkpoint.config.architecture)
    places = None if own.weights is None else own.weights(config)
    theirs = {places[name].name if places and name in places else name for name in expected_tensors(config)}
    quantisation = None if is_mxfp4(checkpoint.quantisation) else checkpoint.quantisation
    floats = as_floats(unpacked(checkpoint, quantisation, where, theirs))
    if own.other_form is not None:
        floats = own.other_form(floats, config)
    if own.stacks is not None:
        floats = StackedWeights(floats, own.stacks(config))
    return in_our_order(floats, config, places, interleaved=own.interleaved)


class FoundConfig(NamedTuple):
    """A checkpoint as it is known before its weights are read."""

    config: ModelConfig
    blocks: bool
    """True if an engine holds the blocks of the checkpoint as they are."""
    dtype_known: bool = True
    """False if nothing says the type of the weights, so that the family's is taken."""


def read_model_config(path: Path, elsewhere: Callable[[], DType | None] | None = None) -> FoundConfig:
    """Read the configuration of a file, or of a directory, which needs no weights for it.

    `elsewhere` is asked for the type of the weights where neither config.json nor a tensor of the directory says it.
    """
    if is_file(path):
        checkpoint = GgufCheckpoint(path)
        checkpoint.close()
        return FoundConfig(checkpoint.config, checkpoint.keeps_its_blocks)
    (config, known), layout = _directory_config(path), int4_layout_of(path)
    if not known and elsewhere is not None and (found := elsewhere()) is not None:
        config, known = replace(config, dtype=found), True
    own = family(config.architecture)
    moved = own.weights is not None or channel_order(config, interleaved=own.interleaved) is not None
    # Engines hold scales in float16, and models in bfloat16 have them in that type.
    held = layout is not None and layout.fits_blocks and config.dtype == "float16"
    return FoundConfig(config, held and not moved and own.stacks is None, known)


def _directory_config(directory: Path) -> tuple[ModelConfig, bool]:
    """Return the configuration of a Hugging Face directory, and whether it or a tensor says the type of the weights."""
    config = read_config(directory)
    if states_dtype(read_decoder_fields(directory / "config.json")[0]):
        return config, True
    if not has_weights(directory):
        return config, False
    checkpoint = Checkpoint(directory)
    checkpoint.close()
    return checkpoint.config, True


def int4_layout_of(directory: Path) -> Int4Layout | None:
    """Return how a Hugging Face directory stores matrices in four bits; None if it does not."""
    path = directory / "config.json"
    given = read_decoder_fields(path)[0].get("quantization_config")
    return None if given is None or is_mxfp4(given) else int4_layout(given, f"{path}: quantization_config")
