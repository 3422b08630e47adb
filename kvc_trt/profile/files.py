"""A profile as files: JSON, CSV and PNG, each whole or not there."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvc_trt.engine.files import disk_error


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path`, replacing what was there only when all of it is written.

    Raises UnsupportedEnvironment for a disk that is full or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(partial, 0o644)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise disk_error(error, f"writing {path}") from error


def json_bytes(result: Mapping[str, Any]) -> bytes:
    """The result as JSON; NaN and infinities are refused."""
    return (json.dumps(result, indent=2, allow_nan=False) + "\n").encode()


def csv_bytes(result: Mapping[str, Any]) -> bytes:
    """One line per context, batch and side; what was not measured is empty."""
    rows = result["rows"]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
