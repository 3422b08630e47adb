"""Records of workers in a store: they lead to the workers' figures, and no other process can pass for a worker."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_whole
from kvc_trt.files.inputs import read_text_input
from kvc_trt.serving.owners import is_gone, owner

_LARGEST = 4096


class Record(NamedTuple):
    """One worker, which may have died."""

    number: int
    """Dynamo's."""
    port: int | None
    """Of its status on this machine, if it shows one."""
    owner: str
    """Its process (`owners.owner`)."""


def write_record(path: Path, number: int, port: str | None) -> None:
    """Write down the worker that this process is."""
    write_whole(path, f"{number} {port or '-'} {owner()}".encode())


def read_record(path: Path) -> Record | None:
    """Return a record; None where there is none, or something else."""
    with contextlib.suppress(InputError, ValueError):
        number, port, *described = read_text_input(path, _LARGEST).split(maxsplit=2)
        record = Record(int(number), None if port == "-" else int(port), "".join(described))
        if 0 <= record.number < 1 << 64 and (record.port is None or 0 < record.port < 1 << 16):
            return record
    return None


def status_urls(directory: Path) -> list[str]:
    """Return where the workers of a directory of records show their status, but for those that are known to be dead."""
    records = [read_record(path) for path in sorted(directory.iterdir())]
    found = [one for one in records if one is not None and one.port is not None and not is_gone(one.owner)]
    return [f"http://127.0.0.1:{one.port}" for one in found]


def forget_dead(directory: Path) -> None:
    """Remove the records of workers that are known to be dead."""
    for path in directory.iterdir():
        record = read_record(path)
        if record is not None and is_gone(record.owner):
            path.unlink(missing_ok=True)
