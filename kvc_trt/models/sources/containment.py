"""The rule for files of a checkpoint: read only from its own directory, or from the Hub cache it is a snapshot in."""

from __future__ import annotations

from pathlib import Path

from kvc_trt.errors import InputError, describe


def contained(directory: Path, name: str) -> Path:
    """Return DIRECTORY/NAME if it may be read; `InputError` for a path or link that leads out of the directory."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise InputError(f"{directory}: {describe(name)} is not a plain file name")
    path = directory / name
    try:
        root, target = directory.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: half of a character in the name
        raise InputError(f"{path}: missing, or a link that leads nowhere") from error
    # Hub cache: models--ORGANISATION--NAME/{blobs,snapshots/COMMIT}; files of a snapshot link to ../../blobs.
    in_hub_cache = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    allowed = [root, root.parent.parent / "blobs"] if in_hub_cache else [root]
    if not any(target.is_relative_to(base) for base in allowed):
        raise InputError(f"{path}: links to {target}, outside of the checkpoint", hint="copy the file instead")
    if not target.is_file():
        raise InputError(f"{path}: not a regular file")
    return path
