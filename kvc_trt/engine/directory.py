"""Open an engine directory: everything is checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.config import BuildConfig
from kvc_trt.engine.configuration import LARGEST_CONFIG, EngineConfig
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
    Manifest,
    hold_files,
    read_manifest,
    rebuild_hint,
)
from kvc_trt.engine.parallel import check_parallel
from kvc_trt.engine.resolution.resolve import check_backend_settings
from kvc_trt.errors import InputError, describe
from kvc_trt.graph.state import StateTensor
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sources.tokenizer import load_tokenizer
from kvc_trt.progress import Progress
from kvc_trt.runtime.chat.template import ChatTemplate

if TYPE_CHECKING:
    from kvc_trt.engine.backend import BuildBackend
    from kvc_trt.files.held import HeldFile
    from kvc_trt.models.sources.tokenizer_library import Tokenizer


@dataclass(frozen=True)
class EngineDirectory:
    """A checked engine directory; create it with `EngineDirectory.open`."""

    path: Path
    config: EngineConfig
    manifest: Manifest
    held: Mapping[str, HeldFile]
    """The files of the manifest, open: everything else reads the bytes that were hashed."""

    @classmethod
    def open(
        cls,
        path: str | Path,
        backends: Mapping[str, BuildBackend],
        *,
        sealed: bool = False,
        progress: Progress | None = None,
    ) -> EngineDirectory:
        """Check the whole directory (version, names, links, sizes, hashes of every file) and return it.

        `backends` are the known ones, by name; `kvc_trt.backends.opening.open_engine` passes them all. With `sealed`,
        the files are copied to memory that nobody can write, and read there.

        Raises InputError with what was expected, what was found, and the command that rebuilds the engine.
        """
        path = Path(path)
        if not path.is_dir():
            state = "is not a directory" if path.exists() else "does not exist"
            raise InputError(f"{path} {state}; expected an engine directory", hint="build one: kvc-trt build --help")
        if not (path / MANIFEST_FILE).exists():
            raise InputError(
                f"{path} is not an engine directory: it has no {MANIFEST_FILE}", hint="build one: kvc-trt build --help"
            )
        manifest = read_manifest(path)
        files = manifest.files
        _check_listed(path, (CONFIG_FILE,), files)
        held = hold_files(path, files, progress, sealed=sealed)
        config = EngineConfig.parse(held[CONFIG_FILE].read(LARGEST_CONFIG), path / CONFIG_FILE)
        engine = cls(path, config, manifest, held)
        expected = _checked_format(engine, backends)
        _check_listed(path, expected.required_files, files)
        if any(name in files for name in expected.files_of_turns):
            _check_listed(path, expected.files_of_turns, files)
        _check_agreement(engine, backends)
        return engine

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """Name -> hash and size of every file but the manifest."""
        return self.manifest.files

    @property
    def model(self) -> ModelConfig:
        """The model, with the dtype in which the engine computes."""
        return self.config.model

    @property
    def parameters(self) -> PolicyParameters:
        """The numbers of the policy."""
        return self.config.parameters

    @property
    def build(self) -> BuildConfig:
        """The settings of the build, which make the same engine again."""
        return self.config.build

    @property
    def prefill_graph(self) -> HeldFile:
        """The prefill graph."""
        return self.held[PREFILL_FILE]

    @property
    def decode_graph(self) -> HeldFile:
        """The decode graph."""
        return self.held[DECODE_FILE]

    @property
    def extend_graph(self) -> HeldFile | None:
        """The extend graph; None if the engine takes no turns."""
        return self.held.get(EXTEND_FILE)

    @property
    def draft_graph(self) -> HeldFile | None:
        """The draft graph; None if the engine was built without one."""
        return self.held.get(DRAFT_FILE)

    @property
    def weight_file(self) -> HeldFile:
        """The weight file that all graphs refer to."""
        return self.held[WEIGHTS_FILE]

    @property
    def tokenizer_files(self) -> dict[str, HeldFile]:
        """The files of the tokenizer, by their names in tokenizer/."""
        inside = f"{TOKENIZER_DIRECTORY}/"
        return {name.removeprefix(inside): file for name, file in self.held.items() if name.startswith(inside)}

    @property
    def tokenizer_file(self) -> HeldFile | None:
        """The tokenizer.json; None for an engine without one, whose prompts are token ids."""
        return self.tokenizer_files.get("tokenizer.json")

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer itself, loaded at the first use; None for an engine without one."""
        return load_tokenizer(self.tokenizer_file)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template that makes a prompt of messages; None for a model without one."""
        return ChatTemplate.of(self.tokenizer_files)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, and through it of every byte of the engine."""
        return self.manifest.digest

    @property
    def backend(self) -> str:
        """The name of the backend this engine was built for."""
        return self.build.backend

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Every state tensor, in the order of config.json; enough to allocate, bind and count bytes."""
        return self.config.state

    @property
    def step_state(self) -> tuple[StateTensor, ...]:
        """The state tensors that a decode step reads and writes."""
        return tuple(tensor for tensor in self.state if tensor.in_step)

    def close(self) -> None:
        """Close all files; one that is used later is opened, and checked, again."""
        for file in self.held.values():
            file.close()

    def weights(self) -> EngineWeights:
        """Return the engine's weights as a source of float32 tensors, dequantised when read."""
        return EngineWeights(self.weight_file)


def _checked_format(engine: EngineDirectory, backends: Mapping[str, BuildBackend]) -> BuildBackend:
    """Return the format of the engine's backend; InputError if the manifest's `target` does not fit it."""
    target, found = engine.manifest.target, backends.get(engine.build.backend)
    problem = f"expected a target of backend {', '.join(backends)}" if found is None else found.target_problem(target)
    if found is None or problem is not None:
        raise InputError(f"{engine.path} was built for {describe(target)}: {problem}", hint=rebuild_hint(engine.path))
    return found


def _check_listed(path: Path, names: Iterable[str], files: Mapping[str, FileRecord]) -> None:
    for name in names:
        if name not in files:
            raise InputError(f"{path}: the manifest lists no {name}", hint=rebuild_hint(path))


def _check_agreement(engine: EngineDirectory, backends: Mapping[str, BuildBackend]) -> None:
    """Raise InputError where config.json, the manifest, the list of files and the backend contradict one another."""
    config, files, hint = engine.config, engine.files, rebuild_hint(engine.path)
    if engine.manifest.build_config != config.build:
        raise InputError(f"{engine.path / MANIFEST_FILE}: build_config is not that of {CONFIG_FILE}", hint=hint)
    if dataclasses.replace(config, turns=EXTEND_FILE in files).state != config.state:
        which = "does not have" if EXTEND_FILE in files else "has"
        raise InputError(f"{engine.path / CONFIG_FILE}: the state {which} the tensors of turns", hint=hint)
    try:
        check_backend_settings(config.build, backends)
        if config.build.tensor_parallel is not None:
            check_parallel(config.build.tensor_parallel, config.model, config.parameters)
    except InputError as error:
        raise InputError(f"{engine.path / CONFIG_FILE}: {error.message}", hint=hint) from error
    if DRAFT_FILE in files and config.build.draft_tokens is None:
        raise InputError(f"{engine.path / CONFIG_FILE}: no draft_tokens, and there is a {DRAFT_FILE}", hint=hint)
