"""SIGTERM and Ctrl-C: a command ends within two seconds, wherever it is, with the code that the help names."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.hostile.faults.moments import after, whole_run
from tests.hostile.faults.outcomes import Outcome
from tests.hostile.faults.subjects import READERS, SUBJECTS, Inputs, Subject
from tests.hostile.faults.trials import Folders, Running

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
WITHIN_SECONDS = 2.0
EARLY_SECONDS = 0.02
"""A process that was only just made has not reached the command line yet."""


def signals(inputs: Inputs, folders: Folders, wanted: int, seed: int) -> Iterator[Outcome]:
    """Send about `wanted` signals to commands at times spread over their lives."""
    chosen = random.Random(seed)
    subjects = (*SUBJECTS.values(), *READERS.values())
    for subject in subjects:
        _, whole = whole_run(subject, inputs, folders)
        for number in CODES:
            for _ in range(max(1, round(wanted / len(subjects) / len(CODES)))):
                yield signalled(subject, inputs, folders, number, chosen.uniform(EARLY_SECONDS, whole.seconds))


def signalled(subject: Subject, inputs: Inputs, folders: Folders, number: signal.Signals, seconds: float) -> Outcome:
    """Send one signal."""
    running = Running(subject.begin(inputs, folders), folders)
    time.sleep(seconds)
    sent = time.monotonic()
    running.signal(number)
    ended = running.wait()
    lasted = time.monotonic() - sent
    problems = [] if ended.code in (0, CODES[number]) else [f"ended with {ended.code}: {ended.line}"]
    if lasted > WITHIN_SECONDS:
        problems.append(f"it ended {lasted:.1f} s later")
    if "Traceback" in ended.errors:
        problems.append("a traceback")
    left = [name for name in folders.leftovers() if not name.startswith("cache/stages/")]
    problems += [f"left at once: {name}" for name in left]
    if subject.target:
        problems += after(subject, inputs, folders)
    return Outcome(subject.name, f"{number.name} after {seconds:.3f} s", problems, {"seconds": lasted})


def long_prefill(inputs: Inputs, folders: Folders) -> Iterator[Outcome]:
    """Send signals into calls of ONNX Runtime that would last for a minute: a model of 135 million parameters."""
    engine, prompt = folders.root / "large", folders.root / "long.json"
    prompt.write_text(str(list(range(1, 4000))))
    build = ["build", "--model", "smollm2-135m-instruct", "--random-weights", "0", "--policy", "rocketkv"]
    folders.make()
    made = Running([*build, "--max-input-len", "4096", "--no-verify", "-o", str(engine)], folders).wait()
    if made.code:
        raise SystemExit(made.errors)

    def ask(inputs: Inputs, target: Path) -> list[str]:
        return ["run", str(engine), "--prompt-ids", str(prompt), "--max-new-tokens", "100"]

    subject = Subject("run, 4,000 tokens", ask, "", lambda target: None)
    for seconds in (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0):
        for number in CODES:
            yield signalled(subject, inputs, folders, number, seconds)
