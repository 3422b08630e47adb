"""Moments in the life of a command: the changes that it makes to files, counted, and times."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from tests.hostile.faults.subjects import Inputs, Subject
from tests.hostile.faults.trials import Ended, Folders, Running

_CHANGES = {"os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.utime", "fcntl.flock"}
"""Python's audit events that say that a file or directory is about to change."""


def count_changes(changed: Callable[[int], None]) -> None:
    """Call `changed` with 1, 2, ... before each change of files that this process makes."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        changed(count)

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        if event in _CHANGES or (event == "open" and _writes(arguments)):
            step()

    fsync = os.fsync

    def counted_fsync(file: int) -> None:
        step()
        fsync(file)

    os.fsync = counted_fsync
    sys.addaudithook(heard)


def _writes(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def die_at(moment: int) -> Callable[[], None]:
    """Return what makes the process kill itself before its change number `moment`."""

    def changed(count: int) -> None:
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: count_changes(changed)


def whole_run(subject: Subject, inputs: Inputs, folders: Folders) -> tuple[int, Ended]:
    """Run the command undisturbed; return how many changes it makes, and how it ended."""
    arguments = subject.begin(inputs, folders)
    record = folders.root / "changes"
    record.write_bytes(b"")
    descriptor = os.open(record, os.O_WRONLY | os.O_APPEND)
    ended = Running(arguments, folders, lambda: count_changes(lambda count: _noted(descriptor))).wait()
    os.close(descriptor)
    if ended.code:
        raise SystemExit(f"{subject.name} fails undisturbed: {ended.errors}")
    return record.stat().st_size, ended


def _noted(descriptor: int) -> None:
    os.write(descriptor, b".")


def spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` of the numbers 1 to `count`, first and last among them; all where there are fewer."""
    if count <= wanted:
        return list(range(1, count + 1))
    if wanted == 1:
        return [count]
    return sorted({1 + round(step * (count - 1) / (wanted - 1)) for step in range(wanted)})


def after(subject: Subject, inputs: Inputs, folders: Folders) -> list[str]:
    """Say what is wrong after a command was disturbed, and after it is given once more."""
    target = folders.output / subject.target
    problem = subject.problem(target) if target.exists() else None
    found = [] if problem is None else [f"half-written: {problem}"]
    refused = target.exists() and subject.refuses(target)
    ended = Running(subject.arguments(inputs, target), folders).wait()
    if ended.code != (2 if refused else 0):
        return [*found, f"the next run ends with {ended.code}: {ended.line}"]
    problem = "is missing" if not target.exists() else subject.problem(target)
    found += [] if problem is None else [f"after the next run: {problem}"]
    return found + [f"left: {name}" for name in folders.leftovers()]
