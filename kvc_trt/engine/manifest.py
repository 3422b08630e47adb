"""manifest.json: what an engine consists of, byte by byte, and how it was built.

The file is its own canonical form (sorted keys, two spaces, one final newline) and carries the SHA-256 of that form
without the digest field, so no byte of it can change unnoticed. That is integrity, not authenticity: whoever can write
to the directory can also write a new manifest. Engines are executable code: trust them as you trust programs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvc_trt.engine.files import check_name, listing, read_bytes, sha256
from kvc_trt.errors import InputError
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.version import __version__

MANIFEST_FILE = "manifest.json"
LARGEST_MANIFEST = 16 << 20
SELF_DIGEST = "sha256"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """The recorded hash and size of one file of an engine."""

    sha256: str
    size: int


def canonical(value: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a JSON document, the form in which an engine stores it."""
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False)
    return text.encode("ascii") + b"\n"


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


def read_manifest(engine: Path) -> dict[str, Any]:
    """Read manifest.json and check its version and its digest; InputError if it is damaged."""
    path = engine / MANIFEST_FILE
    hint = rebuild_hint(engine)
    content = read_bytes(path, LARGEST_MANIFEST)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: damaged, or not a manifest", hint=hint) from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} is not a manifest: expected a JSON object", hint=hint)
    if fields.get("version") != __version__:
        found = fields.get("version")
        raise InputError(f"{engine} was built by kvc-trt {found!r}, expected {__version__!r} (this version)", hint=hint)
    recorded = fields.pop(SELF_DIGEST, None)
    computed = hashlib.sha256(_canonical_or_empty(fields)).hexdigest()
    if recorded != computed or content != sealed(fields):
        raise InputError(f"{path} was changed: its digest is {recorded!r}, its content has {computed!r}", hint=hint)
    return fields


def file_records(fields: Mapping[str, Any], path: Path) -> dict[str, FileRecord]:
    """Return the manifest's table of files after checking every name and value."""
    files = fields.get("files")
    if not isinstance(files, dict):
        raise InputError(f"{path}: 'files' is missing")
    records = {}
    for name, entry in files.items():
        digest, size = (entry.get("sha256"), entry.get("size")) if isinstance(entry, dict) else (None, None)
        if not isinstance(digest, str) or not _HEX.fullmatch(digest) or type(size) is not int or size < 0:
            raise InputError(f"{path}: the entry of {name!r} is malformed")
        records[check_name(name, path)] = FileRecord(digest, size)
    return records


def check_files(engine: Path, records: Mapping[str, FileRecord], progress: Progress | None = None) -> None:
    """Raise InputError unless the files below `engine` are those of the manifest, with equal sizes and hashes."""
    found = listing(engine)
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
    total = sum(record.size for record in records.values())
    with (progress or NullProgress()).task(f"checking {engine.name}", total) as advance:
        for name, record in records.items():
            digest = sha256(engine / name, advance)
            if digest != record.sha256:
                message = f"{engine / name} was changed: expected SHA-256 {record.sha256}, found {digest}"
                raise InputError(message, hint=_hint_for(engine, name))


def _canonical_or_empty(fields: Mapping[str, Any]) -> bytes:
    # json.loads accepts NaN, which the canonical form refuses: a file with NaN is not a valid manifest.
    try:
        return canonical(fields)
    except ValueError:
        return b""
