"""Write an engine as a model of a Triton repository: whole or not at all, and with nothing in it that says where it is.

REPO/NAME/config.pbtxt        which engine, its inputs and outputs
REPO/NAME/1/model.py          imports kvc_trt, nothing more
REPO/NAME/1/engine/           the engine, linked or copied
REPO/NAME/warmup/             the request that has to be answered before the model counts as loaded
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.atomic_files import write_durably
from kvc_trt.engine.manifest import MANIFEST_FILE
from kvc_trt.engine.writer import new_directory, place, writable_target
from kvc_trt.errors import InputError
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.triton import tensors
from kvc_trt.serving.triton.config import VERSION, check_model_name, model_config
from kvc_trt.serving.triton.settings import ENGINE, ModelSettings
from kvc_trt.serving.triton.tensors import TensorType

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

_MODEL_FILE = Path(__file__).with_name("repository_model.py")
_WARMUP_TEXT, _WARMUP_TOKENS = "Hello", 2


def export_model(engine: EngineDirectory, repository: Path, name: str, settings: ServingSettings | None = None) -> Path:
    """Write REPOSITORY/NAME and return its path; the repository is made where there is none.

    Raises InputError for a name that Triton could misread, and for one that is taken; UnsupportedEnvironment for a disk
    that is full.
    """
    target = writable_target(repository / check_model_name(name))
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists and is not replaced", hint="another --name, or remove it")
    warmup = _warmup(engine)
    types = {tensor: TensorType(tensors.INPUTS[tensor].data_type) for tensor in warmup}
    config = model_config(engine, name, ModelSettings(engine.digest, settings or ServingSettings()), types)
    with new_directory(target) as directory:
        version = directory / str(VERSION)
        for made in (version / ENGINE, directory / "warmup"):
            made.mkdir(parents=True)
        write_durably(directory / "config.pbtxt", config.encode())
        write_durably(version / "model.py", _MODEL_FILE.read_bytes())
        for tensor, content in warmup.items():
            write_durably(directory / "warmup" / tensor, content)
        for file in (MANIFEST_FILE, *engine.files):
            place(engine.path / file, version / ENGINE / file)
    return target


def _warmup(engine: EngineDirectory) -> dict[str, bytes]:
    """Return the tensors of the first request as Triton reads them: text if the engine can, and how many tokens."""
    wanted = {"max_tokens": np.int32(_WARMUP_TOKENS).tobytes()}
    if engine.tokenizer is None or not engine.tokenizer.encode(_WARMUP_TEXT).ids:
        return {"input_ids": np.int32(0).tobytes(), **wanted}
    text = _WARMUP_TEXT.encode()
    return {"text_input": len(text).to_bytes(4, "little") + text, **wanted}
