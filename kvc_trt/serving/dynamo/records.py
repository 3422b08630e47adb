"""Records of workers in a store: each has the port of a worker's figures, and identifies the worker's process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_whole
from kvc_trt.files.inputs import read_text_input
from kvc_trt.serving.owners import is_gone, owner

_LARGEST = 4096


class WorkerRecord(NamedTuple):
    """The record of one worker, which may have died since."""

    number: int
    """Dynamo's number of the worker."""
    port: int | None
    """The port of the worker's status on this machine; None if it has none."""
    owner: str
    """The worker's process (`owners.owner`)."""


def write_record(path: Path, number: int, port: str | None) -> None:
    """Write the record of this process, which is a worker."""
    write_whole(path, f"{number} {port or '-'} {owner()}".encode())


def read_record(path: Path) -> WorkerRecord | None:
    """Read a record; None if the file is missing or is not a record."""
    with contextlib.suppress(InputError, ValueError):
        number, port, *described = read_text_input(path, _LARGEST).split(maxsplit=2)
        record = WorkerRecord(int(number), None if port == "-" else int(port), "".join(described))
        if 0 <= record.number < 1 << 64 and (record.port is None or 0 < record.port < 1 << 16):
            return record
    return None


def status_urls(directory: Path) -> list[str]:
    """Return the status URLs of the workers whose records are in a directory, without those known to be dead."""
    records = [read_record(path) for path in sorted(directory.iterdir())]
    found = [one for one in records if one is not None and one.port is not None and not is_gone(one.owner)]
    return [f"http://127.0.0.1:{one.port}" for one in found]


def forget_dead(directory: Path) -> None:
    """Remove the records of workers that are known to be dead."""
    for path in directory.iterdir():
        record = read_record(path)
        if record is not None and is_gone(record.owner):
            path.unlink(missing_ok=True)
