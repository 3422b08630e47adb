"""Full disks: one line and exit code 3, nothing half-written, and the next run with more space succeeds.

Output, cache and temporary files lie on a small tmpfs where this process may mount one. Elsewhere a limit on the size
of single files takes its place, which the moment of a trial says.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile.faults.moments import after
from tests.hostile.faults.outcomes import Outcome
from tests.hostile.faults.subjects import SUBJECTS, Inputs, Subject
from tests.hostile.faults.trials import Ended, Folders, Running

LARGEST = {"build": 5000, "context save": 600, "accuracy": 3000, "profile -o": 3000, "export triton": 3000}
"""KiB that each command has enough of, more or less."""
SMALLEST = 16
ENOUGH = "64m"


def full_disks(inputs: Inputs, folders: Folders, wanted: int) -> Iterator[Outcome]:
    """Run commands on about `wanted` disks of different sizes."""
    each = max(2, wanted // len(LARGEST))
    for name, largest in LARGEST.items():
        for step in range(each):
            yield full_disk(SUBJECTS[name], inputs, folders, SMALLEST + step * (largest - SMALLEST) // (each - 1))


def full_disk(subject: Subject, inputs: Inputs, folders: Folders, kibibytes: int) -> Outcome:
    """Run a command on one disk."""
    with _disk(folders.root / "disk") as disk:
        small = Folders(folders.root if disk is None else disk)
        arguments = subject.begin(inputs, small)
        if disk is None:
            ended = Running(arguments, small, _limit(kibibytes)).wait()
        else:
            _resize(disk, f"{kibibytes}k")
            ended = Running(arguments, small).wait()
            _resize(disk, ENOUGH)
        problems = _wrong(ended)
        left = [name for name in small.leftovers() if not name.startswith("cache/stages/")]
        problems += [f"left at once: {name}" for name in left]
        problems += after(subject, inputs, small)
    kind = "file size limit" if disk is None else "tmpfs"
    return Outcome(subject.name, f"{kind} of {kibibytes} KiB", problems, {"code": ended.code})


def _wrong(ended: Ended) -> list[str]:
    if ended.code == 0:
        return []
    lines = [line for line in ended.errors.splitlines() if line.startswith("error: ")]
    said = len(lines) == 1 and any(words in lines[0].lower() for words in ("no space left", "file too large", "left"))
    return [] if ended.code == 3 and said else [f"ended with {ended.code}: {ended.errors[-300:]}"]


def _limit(kibibytes: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kibibytes << 10, kibibytes << 10))

    return limit


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[Path | None]:
    """Mount a disk; None where this process may not."""
    place.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ENOUGH}", "tmpfs", str(place)], capture_output=True, check=False
    )
    try:
        yield place if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(place)], check=True)


def _resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
