"""Build an engine: digest the inputs, check existing output, run resumable stages, move the directory into place."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from kvc_trt.engine.backend import BuildBackend
from kvc_trt.engine.configuration import EngineConfig
from kvc_trt.engine.directory import EngineDirectory
from kvc_trt.engine.files import sha256
from kvc_trt.engine.format import CONFIG_FILE, TOKENIZER_DIRECTORY
from kvc_trt.engine.manifest import (
    MANIFEST_FILE,
    CheckpointRecord,
    FileRecord,
    FinishedStage,
    Inputs,
    Manifest,
    canonical,
    digest_of,
    sealed,
)
from kvc_trt.engine.resolution.model_choice import ModelSource
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild, weight_bytes
from kvc_trt.engine.stages import Stages, drop_entry
from kvc_trt.engine.writer import check_replaceable, check_space, clear_leftovers, new_directory, place, writable_target
from kvc_trt.errors import InputError, KvcError
from kvc_trt.files.atomic import disk_error, write_durably
from kvc_trt.files.held import HeldFile
from kvc_trt.files.inputs import read_input
from kvc_trt.models.sources.tokenizer import TOKENIZER_FILES, check_tokenizer
from kvc_trt.progress import Progress
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.version import __version__

LIBRARIES = ("numpy", "ml_dtypes", "onnx", "tokenizers")
"""Python packages that every build uses; a backend names further ones."""
DECIDING = ("models", "methods", "operators", "graph", "engine")
"""Packages of kvc-trt that determine the content of an engine of any backend."""


@dataclass(frozen=True)
class BuildResult:
    """The result of a build."""

    engine: EngineDirectory
    status: Literal["built", "up to date"]
    resumed: tuple[str, ...]
    """Stages that an interrupted build had already finished."""
    seconds: float


def build_engine(
    resolved: ResolvedBuild,
    source: ModelSource,
    output: Path,
    backends: Mapping[str, BuildBackend],
    *,
    force: bool,
    progress: Progress,
) -> BuildResult:
    """Build an engine into `output` with its backend out of `backends`, or find it there already.

    Raises InputError if `output` exists, is something else, and `force` is false; UnsupportedEnvironment if the disk is
    full. If the build fails, `output` is left as it was.
    """
    started = time.monotonic()
    backend = backends[resolved.config.backend]
    target, makers = backend.target(resolved), backend.makers(resolved, source, progress)
    output = writable_target(output)
    check_tokenizer(source.tokenizer_files, resolved.model.vocab_size)
    for directory in {path.parent for path in source.tokenizer_files}:
        ChatTemplate.load(directory)  # refuses files that cannot be read; a faulty template shows when it is rendered
    config = EngineConfig(resolved.model, resolved.parameters, resolved.config, turns="extend" in makers)
    with progress.task("reading the inputs", None):
        inputs = inputs_of(config, source, target, backend.sources())
    existing = _existing(output, inputs, backends, force=force, progress=progress)
    entry = digest_of(inputs.model_dump())
    if existing is not None:
        drop_entry(entry)
        clear_leftovers(output)
        return BuildResult(existing, "up to date", (), time.monotonic() - started)
    check_space(output, backend.weight_copies * weight_bytes(resolved.model, resolved.config.weights))
    with Stages.open(entry, progress) as stages:
        for name, file in ((name, file) for name, file in backend.files.items() if name in makers):
            stages.run(name, file, partial(makers[name], finished=stages.directory))
        try:
            small = _small_files(config, source)
            manifest = Manifest(
                version=__version__,
                files=_records(small, stages),
                checkpoint=_checkpoint(source),
                build_config=resolved.config,
                stages=_finished(stages),
                inputs=inputs,
                target=dict(target),
                versions={"python": platform.python_version(), **_versions((*LIBRARIES, *backend.libraries))},
            )
            with new_directory(output, replaceable=_entries(backends) if force else None) as directory:
                _put_together(directory, small, sealed(manifest.to_json()), stages)
        except OSError as error:
            raise disk_error(error, f"writing {output}") from error
        stages.discard()
    engine = EngineDirectory.open(output, backends, progress=progress)
    return BuildResult(engine, "built", tuple(stages.resumed), time.monotonic() - started)


def inputs_of(config: EngineConfig, source: ModelSource, target: Mapping[str, Any], sources: Iterable[Path]) -> Inputs:
    """Return the digests of everything that determines an engine."""
    tokenizer = {path.name: sha256(path.resolve()) for path in source.tokenizer_files}
    return Inputs(
        configuration=digest_of(config.to_json()),
        weights=source.weights.fingerprint(),
        tokenizer=digest_of(tokenizer),
        target=digest_of(target),
        code=_code_digest(sources),
    )


def _code_digest(sources: Iterable[Path]) -> str:
    """Return the SHA-256 of the code that determines an engine, so that changed code is never taken for up to date."""
    root = Path(__file__).parents[1]
    paths = [path for package in DECIDING for path in (root / package).rglob("*.py")]
    return digest_of({os.path.relpath(path, root): sha256(path) for path in (*paths, *sources)})


def _existing(
    output: Path, inputs: Inputs, backends: Mapping[str, BuildBackend], *, force: bool, progress: Progress
) -> EngineDirectory | None:
    """Return the engine at `output` if it is intact and has these inputs; else InputError unless it may be replaced."""
    if not os.path.lexists(output):
        return None
    try:
        engine = EngineDirectory.open(output, backends, progress=progress)
    except KvcError as error:
        problem = error.message
    else:
        found = engine.manifest.inputs.model_dump()
        different = [name for name, digest in inputs.model_dump().items() if found[name] != digest]
        if not different:
            return engine
        problem = f"it is another build (different {', '.join(different)})"
    check_replaceable(output, _entries(backends))
    if not force:
        raise InputError(f"{output} exists and is not replaced: {problem}", hint="--force, or another -o DIRECTORY")
    return None


def _entries(backends: Mapping[str, BuildBackend]) -> frozenset[str]:
    """Return every name that an engine directory of any backend may hold besides its manifest."""
    files = (file.split("/")[0] for backend in backends.values() for file in backend.files.values())
    return frozenset((CONFIG_FILE, TOKENIZER_DIRECTORY, *files))


def _small_files(config: EngineConfig, source: ModelSource) -> dict[str, bytes]:
    """Return the content of the files that are written directly, without a stage."""
    tokenizer = {
        f"{TOKENIZER_DIRECTORY}/{path.name}": read_input(path, TOKENIZER_FILES[path.name])
        for path in source.tokenizer_files
    }
    return {CONFIG_FILE: canonical(config.to_json()), **tokenizer}


def _put_together(directory: Path, small: Mapping[str, bytes], manifest: bytes, stages: Stages) -> None:
    for name, content in {**small, MANIFEST_FILE: manifest}.items():
        (directory / name).parent.mkdir(exist_ok=True)
        write_durably(directory / name, content)
    for receipt in stages.receipts:
        for name in receipt.files:
            place(HeldFile(stages.directory / name), directory / name)


def _records(small: Mapping[str, bytes], stages: Stages) -> dict[str, FileRecord]:
    records = {name: FileRecord(hashlib.sha256(content).hexdigest(), len(content)) for name, content in small.items()}
    for receipt in stages.receipts:
        records |= receipt.files
    return records


def _checkpoint(source: ModelSource) -> CheckpointRecord:
    return CheckpointRecord(source=source.description, commit=source.commit, fingerprint=source.weights.fingerprint())


def _finished(stages: Stages) -> tuple[FinishedStage, ...]:
    return tuple(FinishedStage(**dict(receipt), resumed=receipt.name in stages.resumed) for receipt in stages.receipts)


def _versions(libraries: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
