"""kill -9: whatever a command was doing, its target is whole or not there, and the next run cleans up."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

from tests.hostile.faults.moments import after, die_at, spread, whole_run
from tests.hostile.faults.outcomes import Outcome
from tests.hostile.faults.subjects import SUBJECTS, Inputs, Subject
from tests.hostile.faults.trials import Folders, Running

SHARES = {
    "build": 0.2,
    "build over another": 0.15,
    "context save": 0.15,
    "context save over another": 0.1,
    "accuracy": 0.15,
    "profile -o": 0.1,
    "export llm-api": 0.05,
    "export triton": 0.05,
    "export triton ensemble": 0.05,
}
"""Each command's share of all kills: half of them at its changes of files, half at times."""


def kills(inputs: Inputs, folders: Folders, wanted: int, seed: int) -> Iterator[Outcome]:
    """Kill commands at about `wanted` moments."""
    chosen = random.Random(seed)
    for name, share in SHARES.items():
        subject, number = SUBJECTS[name], max(2, round(wanted * share))
        changes, whole = whole_run(subject, inputs, folders)
        for moment in spread(changes, number // 2):
            yield killed_at_change(subject, inputs, folders, moment, changes)
        for _ in range(number - number // 2):
            yield _killed_at_time(subject, inputs, folders, chosen.uniform(0, whole.seconds))


def killed_at_change(subject: Subject, inputs: Inputs, folders: Folders, moment: int, changes: int) -> Outcome:
    """Kill a command before one of its changes of files."""
    ended = Running(subject.begin(inputs, folders), folders, die_at(moment)).wait()
    problems = [] if ended.code in (0, -signal.SIGKILL) else [f"ended with {ended.code}: {ended.line}"]
    return Outcome(subject.name, f"change {moment} of {changes}", [*problems, *after(subject, inputs, folders)])


def _killed_at_time(subject: Subject, inputs: Inputs, folders: Folders, seconds: float) -> Outcome:
    running = Running(subject.begin(inputs, folders), folders)
    time.sleep(seconds)
    running.signal(signal.SIGKILL)
    running.wait()
    return Outcome(subject.name, f"{seconds:.3f} s", after(subject, inputs, folders))
