"""The record of an engine's verifications, a file of its own in the engine's directory.

It names the engine by the digest of its manifest, so a record of another build counts for nothing. Like the manifest it
is integrity and not authenticity: whoever can write to the directory can write a record.
"""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvc_trt.engine.files import VERIFICATION_FILE
from kvc_trt.engine.manifest import Digest, Text, strict_json
from kvc_trt.errors import KvcError
from kvc_trt.files.atomic import write_json
from kvc_trt.files.inputs import read_input
from kvc_trt.validation import OwnSchema, validated_document
from kvc_trt.version import __version__

if TYPE_CHECKING:
    from kvc_trt.engine.directory import EngineDirectory

_LARGEST = 1 << 20
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Verification(OwnSchema):
    """One verification: how it was done, and how it ended."""

    level: Text
    passed: bool
    run_by: Text
    """The backend that ran the engine, with its version."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
    samples: _Count | None = None
    """Most questions at one length, or the questions of each task."""
    steps: _Count | None = None
    """Teacher-forced steps, and greedy tokens."""
    time: Text = Field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    version: Text = __version__
    """The kvc-trt that verified it."""


class _Record(OwnSchema):
    engine: Digest
    """SHA-256 of the manifest of the engine that was verified."""
    verifications: tuple[Verification, ...]


def verifications_of(engine: EngineDirectory) -> tuple[Verification, ...]:
    """Return the verifications of this very engine, the last one last; none where the record is damaged."""
    path = engine.path / VERIFICATION_FILE
    if not path.exists():
        return ()
    try:
        found = strict_json(read_input(path, _LARGEST, follow_links=False), path)
        record = validated_document(_Record, found, str(path))
    except KvcError:
        return ()
    return record.verifications if record.engine == engine.digest else ()


def record_verification(engine: EngineDirectory, found: Verification) -> None:
    """Add a verification to the record, in place of an earlier one of its level and backend.

    An engine that cannot be written to stays without.
    """
    others = [one for one in verifications_of(engine) if (one.level, one.run_by) != (found.level, found.run_by)]
    record = _Record(engine=engine.digest, verifications=(*others, found))
    with contextlib.suppress(KvcError, OSError):
        write_json(engine.path / VERIFICATION_FILE, record.model_dump(mode="json"))


def is_verified(engine: EngineDirectory) -> bool:
    """Return whether this very engine has passed all rungs, with this version of kvc-trt."""
    return any(
        one.passed and one.level in ("quick", "full") and one.version == __version__ for one in verifications_of(engine)
    )
