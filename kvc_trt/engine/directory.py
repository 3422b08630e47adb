"""Open an engine directory: everything is checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvc_trt.config import BuildConfig
from kvc_trt.engine.files import read_bytes
from kvc_trt.engine.format import (
    CONFIG_FILE,
    DECODE_FILE,
    DRAFT_FILE,
    EXTEND_FILE,
    PREFILL_FILE,
    TOKENIZER_DIRECTORY,
    WEIGHTS_FILE,
)
from kvc_trt.engine.manifest import (
    MANIFEST_FILE,
    FileRecord,
    check_files,
    digest_of,
    file_records,
    read_manifest,
    rebuild_hint,
)
from kvc_trt.errors import InputError
from kvc_trt.graph.state import ITEM_SIZE, StateTensor
from kvc_trt.methods.base.constants import ADDED_LATER
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.pretrained_config import from_pretrained_config
from kvc_trt.operators.dimensions import page_multiple
from kvc_trt.operators.tensors import BOUNDS
from kvc_trt.progress import Progress
from kvc_trt.runtime import load_tokenizer
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.validation import validated
from kvc_trt.version import __version__

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvc_trt.engine.backend import BuildBackend
    from kvc_trt.graph.weights import EngineWeights

LARGEST_CONFIG = 16 << 20


@dataclass(frozen=True)
class EngineDirectory:
    """A checked engine directory; create it with `EngineDirectory.open`."""

    path: Path
    config: Mapping[str, Any]
    """Content of config.json: version, pretrained_config, build_config, kv_compression."""
    manifest: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    model: ModelConfig
    parameters: PolicyParameters
    build: BuildConfig

    @classmethod
    def open(
        cls, path: str | Path, backends: Mapping[str, BuildBackend], *, progress: Progress | None = None
    ) -> EngineDirectory:
        """Check the whole directory (version, names, links, sizes, hashes of every file) and return it.

        `backends` are the known ones, by name; `kvc_trt.backends.registry.open_engine` passes them all.

        Raises InputError with what was expected, what was found, and the command that rebuilds the engine.
        """
        path = Path(path)
        if not path.is_dir():
            state = "is not a directory" if path.exists() else "does not exist"
            raise InputError(f"{path} {state}; expected an engine directory", hint="build one: kvc-trt build --help")
        if not (path / MANIFEST_FILE).exists():
            raise InputError(f"{path} is not an engine directory: it has no {MANIFEST_FILE}")
        manifest = read_manifest(path)
        files = file_records(manifest, path / MANIFEST_FILE)
        check_files(path, files, progress)
        _check_listed(path, (CONFIG_FILE,), files)
        config = _read_config(path)
        engine = cls(path, config, manifest, files, *_interpret(config, path / CONFIG_FILE))
        expected = _checked_format(engine, backends)
        _check_listed(path, expected.required_files, files)
        if any(name in files for name in expected.files_of_turns):
            _check_listed(path, expected.files_of_turns, files)
        return engine

    @property
    def prefill_path(self) -> Path:
        """Path of the prefill graph."""
        return self.path / PREFILL_FILE

    @property
    def decode_path(self) -> Path:
        """Path of the decode graph."""
        return self.path / DECODE_FILE

    @property
    def extend_path(self) -> Path | None:
        """Path of the extend graph; None if the engine takes no turns."""
        return self.path / EXTEND_FILE if EXTEND_FILE in self.files else None

    @property
    def draft_path(self) -> Path | None:
        """Path of the draft graph; None if the engine was built without one."""
        return self.path / DRAFT_FILE if DRAFT_FILE in self.files else None

    @property
    def weights_path(self) -> Path:
        """Path of the weight file that all graphs refer to."""
        return self.path / WEIGHTS_FILE

    @property
    def tokenizer_path(self) -> Path | None:
        """Path of tokenizer.json; None for an engine without one, whose prompts are token ids."""
        name = f"{TOKENIZER_DIRECTORY}/tokenizer.json"
        return self.path / name if name in self.files else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer itself, loaded at the first use; None for an engine without one."""
        return cast("Tokenizer | None", load_tokenizer(self.tokenizer_path))

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template that makes a prompt of messages; None for a model without one."""
        return ChatTemplate.load(self.path / TOKENIZER_DIRECTORY)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest, and through it of every byte of the engine."""
        return digest_of(self.manifest)

    @property
    def backend(self) -> str:
        """Name of the backend this engine was built for."""
        return str(self.config["build_config"]["kvc_trt"]["backend"])

    @cached_property
    def state(self) -> tuple[StateTensor, ...]:
        """Every state tensor, in the order of config.json; enough to allocate, bind and count bytes."""
        return tuple(
            StateTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in self.config["kv_compression"]["state"]
        )

    @property
    def step_state(self) -> tuple[StateTensor, ...]:
        """The state tensors that a decode step reads and writes."""
        return tuple(tensor for tensor in self.state if tensor.in_step)

    def weights(self) -> EngineWeights:
        """Return the engine's weights as a source of float32 tensors, dequantised when read."""
        from kvc_trt.graph.weights import EngineWeights

        return EngineWeights(self.weights_path)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_bytes(path / CONFIG_FILE, LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path / CONFIG_FILE} is not valid JSON", hint=rebuild_hint(path)) from error
    if not isinstance(config, dict) or config.get("version") != __version__:
        found = config.get("version") if isinstance(config, dict) else None
        message = f"{path / CONFIG_FILE}: version {found!r}, expected {__version__!r}"
        raise InputError(message, hint=rebuild_hint(path))
    return config


def _checked_format(engine: EngineDirectory, backends: Mapping[str, BuildBackend]) -> BuildBackend:
    """Return the format of the engine's backend; InputError if the manifest's `target` does not fit it."""
    target, found = engine.manifest.get("target"), backends.get(engine.build.backend)
    problem = f"expected a target of backend {', '.join(backends)}" if found is None else found.target_problem(target)
    if found is None or problem is not None:
        raise InputError(f"{engine.path} was built for {target}: {problem}", hint=rebuild_hint(engine.path))
    return found


def _check_listed(path: Path, names: Iterable[str], files: Mapping[str, FileRecord]) -> None:
    for name in names:
        if name not in files:
            raise InputError(f"{path}: the manifest lists no {name}", hint=rebuild_hint(path))


def _interpret(config: Mapping[str, Any], source: Path) -> tuple[ModelConfig, PolicyParameters, BuildConfig]:
    try:
        model = from_pretrained_config(config["pretrained_config"], source=str(source))
        parameters = parameters_from(config["kv_compression"]["parameters"], str(source))
        build = validated(BuildConfig, config["build_config"]["kvc_trt"], f"{source}: build_config.kvc_trt")
        _check_pages(config["kv_compression"].get("state", ()), source)
    except (LookupError, TypeError) as error:
        raise InputError(f"{source} is incomplete: {error}", hint=rebuild_hint(source.parent)) from error
    return model, parameters, build


def _check_pages(state: Iterable[Mapping[str, Any]], source: Path) -> None:
    """Raise InputError for a 16-bit engine that was built before the pages of bounds were rounded up."""
    for entry in state:
        if str(entry["name"]).partition(".")[0] == BOUNDS.name:
            pages, multiple = entry["shape"][-1], page_multiple(ITEM_SIZE[entry["dtype"]])
            if pages % multiple:
                found = f"{entry['name']} has {pages} pages, expected a multiple of {multiple}"
                raise InputError(f"{source}: {found} in {entry['dtype']}", hint=rebuild_hint(source.parent))


def parameters_from(mapping: Mapping[str, Any], source: str) -> PolicyParameters:
    """Return the resolved parameters that config.json records; InputError for missing or unknown names,
    and for kinds that this version does not know."""
    names = {field.name for field in dataclasses.fields(PolicyParameters)}
    if set(mapping) | ADDED_LATER != names:
        different = ", ".join(sorted(names.symmetric_difference(mapping)))
        raise InputError(f"{source}: kv_compression.parameters differs from this version's in: {different}")
    tables = {name: _tuples(value) for name, value in mapping.items() if isinstance(value, list)}
    parameters = PolicyParameters(**{**mapping, **tables})
    try:
        parameters.check_kinds()
    except InputError as error:
        raise InputError(f"{source}: {error.message}") from error
    return parameters


def _tuples(value: Any) -> Any:
    """Turn the lists that JSON made of tuples back into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
