"""manifest.json: the files of an engine with their digests, and how it was built.

The file is its own canonical form (sorted keys, two spaces, one final newline) and carries the SHA-256 of that form
without the digest field, so no byte of it can change unnoticed. That is integrity, not authenticity: whoever can write
to the directory can also write a new manifest. Engines are executable code: trust them as you trust programs.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.config import BuildConfig
from kvc_trt.engine.files import check_name, is_beside, listing
from kvc_trt.errors import InputError, describe
from kvc_trt.files.held import HeldFile
from kvc_trt.files.inputs import read_input
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.validation import OwnSchema, validated_document
from kvc_trt.version import __version__

MANIFEST_FILE = "manifest.json"
LARGEST_MANIFEST = 2 << 20
SELF_DIGEST = "sha256"
DEEPEST = 12
"""Levels of a JSON document of ours; what is read has up to six."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, Field(max_length=1 << 16)]


@dataclass(frozen=True)
class FileRecord:
    """The recorded hash and size of one file of an engine."""

    sha256: Digest
    size: Bytes


class Receipt(OwnSchema):
    """The record of one finished stage of a build."""

    name: Text
    inputs: Digest
    """Digest of the build's inputs."""
    seconds: Annotated[float, Field(ge=0, le=1e9)]
    peak_rss_bytes: Bytes
    """Peak resident size of the process up to the end of the stage."""
    files: dict[str, FileRecord]


class FinishedStage(Receipt):
    """A stage, as the manifest of an engine lists it."""

    resumed: bool
    """True if an earlier build, which was interrupted, had finished it."""


class CheckpointRecord(OwnSchema):
    """The weights that an engine was built from."""

    source: Text
    commit: Text | None
    fingerprint: Digest


class Inputs(OwnSchema):
    """The digests of everything that determines an engine."""

    configuration: Digest
    weights: Digest
    tokenizer: Digest
    target: Digest
    code: Digest


class Manifest(OwnSchema):
    """manifest.json without its own digest."""

    version: str
    files: dict[str, FileRecord]
    checkpoint: CheckpointRecord
    build_config: BuildConfig
    stages: tuple[FinishedStage, ...]
    inputs: Inputs
    target: dict[str, Any]
    """The machine that runs the engine; its backend defines and checks it."""
    versions: dict[str, Text]
    """Python and the libraries of the build."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the file."""
        return recorded(self._fields)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, and through it of every byte of the engine."""
        return digest_of(self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        return {**self.model_dump(), "build_config": self.build_config.stored()}


def canonical(value: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a JSON document, the form in which an engine stores it."""
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False)
    return text.encode("ascii") + b"\n"


def recorded(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON document as an engine's file holds it: names in the file's order, lists for tuples."""
    document: dict[str, Any] = json.loads(canonical(value))
    return document


def digest_of(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of the canonical form."""
    return hashlib.sha256(canonical(fields)).hexdigest()


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes of manifest.json for `fields`, with the digest of their canonical form added."""
    return canonical({**fields, SELF_DIGEST: digest_of(fields)})


def rebuild_hint(engine: Path) -> str:
    """Return the command that rebuilds an engine from its recorded configuration."""
    config, output = shlex.quote(str(engine / "config.json")), shlex.quote(str(engine))
    return f"rebuild it: kvc-trt build --config {config} -o {output} --force"


def _hint_for(engine: Path, name: str) -> str:
    """Return the hint for one damaged file; an engine cannot be rebuilt from a damaged configuration."""
    if name != "config.json":
        return rebuild_hint(engine)
    output = shlex.quote(str(engine))
    return f"build it again from its original options: kvc-trt build --model MODEL --policy POLICY -o {output} --force"


def read_manifest(engine: Path) -> Manifest:
    """Read manifest.json and check its version, its digest and every field; InputError if it is damaged."""
    path = engine / MANIFEST_FILE
    hint = rebuild_hint(engine)
    content = read_input(path, LARGEST_MANIFEST, follow_links=False)
    fields = strict_json(content, path, hint=hint)
    if (version := fields.get("version")) != __version__:
        found = f"built by kvc-trt {describe(version)}, expected {__version__!r} (this version)"
        raise InputError(f"{engine} was {found}", hint=hint)
    given, computed = fields.pop(SELF_DIGEST, None), digest_of(fields)
    if given != computed or content != sealed(fields):
        found = f"its digest is {describe(given)}, its content has {computed!r}"
        raise InputError(f"{path} was changed: {found}", hint=hint)
    manifest = validated_document(Manifest, fields, str(path))
    if manifest.digest != computed:  # a number in another form than a build writes it, or a setting that is off
        raise InputError(f"{path} is not in the form in which builds write it", hint=hint)
    for name in manifest.files:
        check_name(name, path)
    return manifest


def strict_json(content: bytes, source: Path, *, hint: str | None = None) -> dict[str, Any]:
    """Return the JSON object of a file of ours; InputError for anything else, and for infinite numbers and depths."""
    try:
        found = json.loads(content)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not valid JSON: {describe(str(error))}", hint=hint) from error
    if not isinstance(found, dict):
        raise InputError(f"{source}: expected a JSON object, found {describe(found)}", hint=hint)
    if _deeper(found, DEEPEST):
        raise InputError(f"{source}: nested more than {DEEPEST} deep", hint=hint)
    return found


def _deeper(document: Any, levels: int) -> bool:
    """Return whether a document has more levels; the time of its canonical form grows with the square of the depth."""
    level: list[Any] = [document]
    for _ in range(levels):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for values in inside for one in values if isinstance(one, (dict, list))]
    return bool(level)


def hold_files(
    engine: Path, records: Mapping[str, FileRecord], progress: Progress | None = None, *, sealed: bool = False
) -> dict[str, HeldFile]:
    """Open and return, by name, every file below `engine`; with `sealed`, copies in memory.

    Raises InputError unless they are those of the manifest, with equal sizes and hashes.
    """
    found = {name: size for name, size in listing(engine).items() if not is_beside(name)}
    found.pop(MANIFEST_FILE, None)
    for name in sorted(records.keys() - found.keys()):
        raise InputError(f"{engine / name} is missing", hint=_hint_for(engine, name))
    for name in sorted(found.keys() - records.keys()):
        message = f"{engine / name} is not in the manifest; an engine directory holds nothing else"
        raise InputError(message, hint=rebuild_hint(engine))
    for name, record in records.items():
        if found[name] != record.size:
            message = f"{engine / name} has the wrong size: expected {record.size} bytes, found {found[name]}"
            raise InputError(message, hint=_hint_for(engine, name))
    held = {
        name: HeldFile(engine / name, record.sha256, sealed=sealed, hint=_hint_for(engine, name))
        for name, record in records.items()
    }
    total = sum(record.size for record in records.values())
    with (progress or NullProgress()).task(f"checking {engine.name}", total) as advance:
        for file in held.values():
            file.open(advance)
    return held
