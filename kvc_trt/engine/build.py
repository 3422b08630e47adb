"""A build from beginning to end: inputs' digest, existing output, resumable stages, and the directory put in place."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol

import kvc_trt
from kvc_trt.atomic_files import disk_error, write_durably
from kvc_trt.engine.directory import Engine
from kvc_trt.engine.files import sha256
from kvc_trt.engine.manifest import MANIFEST_FILE, FileRecord, canonical, sealed
from kvc_trt.engine.model_choice import ModelSource
from kvc_trt.engine.request import Request, weight_bytes
from kvc_trt.engine.stages import Stages
from kvc_trt.engine.targets import CONFIG_FILE, STAGES, TOKENIZER_DIRECTORY
from kvc_trt.engine.tokenizer import check_tokenizer
from kvc_trt.engine.writer import check_replaceable, check_space, new_directory, place, writable_target
from kvc_trt.errors import InputError, KvcError
from kvc_trt.models.quantisation import BLOCK
from kvc_trt.progress import Progress
from kvc_trt.version import __version__

QUANTISATION = {"int8": "W8A16", "int4": "W4A16"}
LIBRARIES = ("numpy", "ml_dtypes", "onnx", "onnxruntime", "tokenizers", "tensorrt", "tensorrt_llm")
COMPILING = {
    "tensorrt": (
        "tensorrt/lowering/*.py",
        "tensorrt/builder.py",
        "tensorrt/network.py",
        "tensorrt/configuration.py",
        "tensorrt/profiles.py",
    ),
    "tensorrt-llm": ("tensorrt_llm/*.py", "tensorrt/profiles.py"),
}
"""Backend -> sources below `backends` that decide, besides its build.py, what a compiled engine does."""


class Maker(Protocol):
    """Writes one stage's file."""

    def __call__(self, path: Path, *, finished: Path) -> None:
        """Write `path`; the files of earlier stages are in the directory `finished`."""


Makers = Mapping[str, Maker]
"""By stage: those of `STAGES` for the backend."""


@dataclass(frozen=True)
class BuildResult:
    """What a build came to."""

    engine: Engine
    status: Literal["built", "up to date"]
    resumed: tuple[str, ...]
    """Stages that an interrupted build had finished."""
    seconds: float


def build_engine(
    request: Request,
    source: ModelSource,
    makers: Makers,
    output: Path,
    *,
    target: Mapping[str, Any],
    force: bool,
    progress: Progress,
) -> BuildResult:
    """Build `request` into `output`, or find it there already. `target` goes into the manifest as it is.

    Raises InputError when something else stands at `output` and `force` is false; UnsupportedEnvironment for a full
    disk. Whatever happens, `output` holds what it held before or the whole new engine.
    """
    started = time.monotonic()
    output = writable_target(output)
    check_tokenizer(source.tokenizer_files, request.model.vocab_size)
    config_json = engine_config(request)
    with progress.task("reading the inputs", None):
        inputs = inputs_of(config_json, source, target, request.config.backend)
    existing = _existing(output, inputs, force=force, progress=progress)
    if existing is not None:
        return BuildResult(existing, "up to date", (), time.monotonic() - started)
    files = STAGES[request.config.backend]
    plans = sum(name.endswith(".engine") for name in files)
    check_space(output, (1 + plans) * weight_bytes(request.model, request.config.weights))
    with Stages.open(_digest(inputs), progress) as stages:
        for name, file in files.items():
            stages.run(name, file, partial(makers[name], finished=stages.directory))
        try:
            _put_together(output, request, source, config_json, target, inputs, stages, replace=force)
        except OSError as error:
            raise disk_error(error, f"writing {output}") from error
        stages.discard()
    engine = Engine.open(output, progress=progress)
    return BuildResult(engine, "built", tuple(stages.resumed), time.monotonic() - started)


def engine_config(request: Request) -> dict[str, Any]:
    """Return config.json: TensorRT-LLM's three sections and field names, and the resolved compression."""
    from kvc_trt.graph.state import state_tensors
    from kvc_trt.models.pretrained_config import to_pretrained_config

    parameters = request.parameters
    pretrained = to_pretrained_config(request.model)
    algorithm = QUANTISATION.get(request.config.weights)
    if algorithm is not None:
        pretrained["quantization"] = {**pretrained["quantization"], "quant_algo": algorithm, "group_size": BLOCK}
    return {
        "version": __version__,
        "pretrained_config": pretrained,
        "build_config": {
            "max_input_len": parameters.max_input_len,
            "max_seq_len": parameters.max_sequence_len,
            "max_batch_size": request.config.max_batch_size,
            "max_beam_width": 1,
            "kv_cache_type": "CONTINUOUS",
            "gather_context_logits": False,
            "gather_generation_logits": False,
            "strongly_typed": True,
            "plugin_config": {},
            "kvc_trt": request.config.stored(),
        },
        "kv_compression": {
            "parameters": dataclasses.asdict(parameters),
            "state": [dataclasses.asdict(tensor) for tensor in state_tensors(request.model, parameters, request.dtype)],
        },
    }


def inputs_of(
    config_json: Mapping[str, Any], source: ModelSource, target: Mapping[str, Any], backend: str
) -> dict[str, str]:
    """Return the digests of everything an engine follows from."""
    tokenizer = {path.name: sha256(path.resolve()) for path in source.tokenizer_files}
    return {
        "configuration": _digest(config_json),
        "weights": source.weights.fingerprint(),
        "tokenizer": _digest(tokenizer),
        "target": _digest(target),
        "code": _code_digest(backend),
    }


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def _code_digest(backend: str) -> str:
    """SHA-256 over the sources that decide what is in an engine: a changed graph is never called up to date."""
    root = Path(kvc_trt.__file__).parent
    paths = [path for package in ("models", "policies", "graph", "engine") for path in (root / package).rglob("*.py")]
    paths += (root / "backends").glob("*/build.py")
    paths += [path for pattern in COMPILING.get(backend, ()) for path in (root / "backends").glob(pattern)]
    return _digest({path.relative_to(root).as_posix(): sha256(path) for path in paths})


def _existing(output: Path, inputs: Mapping[str, str], *, force: bool, progress: Progress) -> Engine | None:
    """The engine at `output` if it is this very build and intact; otherwise it must be absent or replaceable."""
    if not os.path.lexists(output):
        return None
    try:
        engine = Engine.open(output, progress=progress)
    except KvcError as error:
        problem = error.message
    else:
        found = engine.manifest.get("inputs", {})
        different = [name for name, digest in inputs.items() if found.get(name) != digest]
        if not different:
            return engine
        problem = f"it is another build (different {', '.join(different)})"
    if not force:
        raise InputError(f"{output} exists and is not replaced: {problem}", hint="--force, or another -o DIRECTORY")
    check_replaceable(output)
    return None


def _put_together(
    output: Path,
    request: Request,
    source: ModelSource,
    config_json: Mapping[str, Any],
    target: Mapping[str, Any],
    inputs: Mapping[str, str],
    stages: Stages,
    *,
    replace: bool,
) -> None:
    with new_directory(output, replace=replace) as directory:
        small = {CONFIG_FILE: canonical(config_json)}
        small |= {f"{TOKENIZER_DIRECTORY}/{path.name}": path.read_bytes() for path in source.tokenizer_files}
        for name, content in small.items():
            (directory / name).parent.mkdir(exist_ok=True)
            write_durably(directory / name, content)
        records = {
            name: FileRecord(hashlib.sha256(content).hexdigest(), len(content)) for name, content in small.items()
        }
        for receipt in stages.receipts:
            records |= receipt.files
        manifest = _manifest(request, source, target, inputs, stages, records)
        write_durably(directory / MANIFEST_FILE, sealed(manifest))
        for receipt in stages.receipts:
            for name in receipt.files:
                place(stages.directory / name, directory / name)


def _manifest(
    request: Request,
    source: ModelSource,
    target: Mapping[str, Any],
    inputs: Mapping[str, str],
    stages: Stages,
    records: Mapping[str, FileRecord],
) -> dict[str, Any]:
    return {
        "version": __version__,
        "files": {name: dataclasses.asdict(record) for name, record in records.items()},
        "inputs": dict(inputs),
        "target": dict(target),
        "versions": {"python": platform.python_version(), **_library_versions()},
        "checkpoint": {
            "source": source.description,
            "commit": source.commit,
            "fingerprint": source.weights.fingerprint(),
        },
        "build_config": request.config.stored(),
        "stages": [
            {**dataclasses.asdict(receipt), "resumed": receipt.name in stages.resumed} for receipt in stages.receipts
        ],
    }


def _library_versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
