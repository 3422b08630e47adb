"""Write an engine into a Triton repository, whole or not at all; no file in it contains a path of this machine.

REPO/NAME/config.pbtxt        which engine, its inputs and outputs
REPO/NAME/1/model.py          imports kvc_trt, nothing more
REPO/NAME/1/engine/           the engine, linked or copied
REPO/NAME/warmup/             the request that has to be answered before the model counts as loaded
"""

from __future__ import annotations

import contextlib
import filecmp
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.engine.files import listing
from kvc_trt.engine.manifest import MANIFEST_FILE, sealed
from kvc_trt.engine.writer import new_directory, place, writable_target
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_durably
from kvc_trt.files.held import HeldFile
from kvc_trt.files.unfinished import unfinished_directory
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.triton.config import VERSION, PythonModel, WarmupTensor, check_model_name
from kvc_trt.serving.triton.settings import ENGINE, ModelSettings
from kvc_trt.serving.triton.tensors import INPUTS, OUTPUTS

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

_MODEL_FILE = Path(__file__).with_name("repository_model.py")
WARMUP_TEXT, WARMUP_TOKENS = "Hello", 2


@dataclass(frozen=True)
class RepositoryModel:
    """One model of a repository, ready to be written."""

    name: str
    config: str
    """The text of config.pbtxt."""
    files: Mapping[str, HeldFile | bytes] = field(default_factory=dict)
    """Files or contents to write beside model.py, by their paths there; an ensemble has none, and no model.py."""
    warmup: Mapping[str, WarmupTensor] = field(default_factory=dict)


def export_model(engine: EngineDirectory, repository: Path, name: str, settings: ServingSettings | None = None) -> Path:
    """Write REPOSITORY/NAME and return its path; the repository is made if it does not exist.

    Raises InputError for a name that is unsafe or taken; UnsupportedEnvironment if the disk is full.
    """
    check_model_name(name)
    warmup = _warmup(engine)
    model = PythonModel(name, ModelSettings(engine.digest, settings or ServingSettings()), INPUTS, OUTPUTS, warmup)
    (target,) = write_models(
        repository, [RepositoryModel(name, model.config(engine), engine_files(engine), warmup)], "another --name"
    )
    return target


def engine_files(engine: EngineDirectory) -> dict[str, HeldFile | bytes]:
    """Return the files of an engine by their paths beside model.py."""
    files = {f"{ENGINE}/{name}": file for name, file in engine.held.items()}
    return {f"{ENGINE}/{MANIFEST_FILE}": sealed(engine.manifest.to_json()), **files}


def write_models(repository: Path, models: Sequence[RepositoryModel], instead: str) -> list[Path]:
    """Write models into a repository in their order, and return their paths.

    If the last one is missing, existing others are kept if they are equal byte for byte: a killed process left them.
    Raises InputError with `instead` in its hint for any other name that is taken, before anything is written.
    """
    targets = [writable_target(repository / model.name) for model in models]
    with contextlib.ExitStack() as stack:
        # The directory that is entered last is put in place first.
        for model, target in reversed(list(zip(models, targets, strict=True))):
            if not os.path.lexists(target):
                _write(model, stack.enter_context(new_directory(target)))
            elif target == targets[-1] or not _is_written(model, target):
                raise InputError(f"{target} exists and is not replaced", hint=f"{instead}, or remove it")
    return targets


def _is_written(model: RepositoryModel, target: Path) -> bool:
    """Return whether the directory `target` equals the model byte for byte."""
    with unfinished_directory(target) as directory:
        _write(model, directory)
        names = listing(directory)
        same = target.is_dir() and listing(target) == names
        return same and all(filecmp.cmp(directory / name, target / name, shallow=False) for name in names)


def _write(model: RepositoryModel, directory: Path) -> None:
    version = directory / str(VERSION)
    version.mkdir()
    write_durably(directory / "config.pbtxt", model.config.encode())
    if model.files:
        write_durably(version / "model.py", _MODEL_FILE.read_bytes())
    for file, source in model.files.items():
        (version / file).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            write_durably(version / file, source)
        else:
            place(source, version / file)
    for tensor, found in model.warmup.items():
        (directory / "warmup").mkdir(exist_ok=True)
        write_durably(directory / "warmup" / tensor, found.content)


def _warmup(engine: EngineDirectory) -> dict[str, WarmupTensor]:
    """Return the tensors of the warm-up request: text if the engine has a tokenizer, otherwise token ids."""
    wanted = {"max_tokens": WarmupTensor.tokens([WARMUP_TOKENS])}
    if engine.tokenizer is None or not engine.tokenizer.encode(WARMUP_TEXT).ids:
        return {"input_ids": WarmupTensor.tokens([0]), **wanted}
    return {"text_input": WarmupTensor.text(WARMUP_TEXT), **wanted}
