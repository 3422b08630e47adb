"""Trials of kvc-trt's commands on a failing machine: `make faults`, or `python -m tests.hostile.faults`.

Prints what went wrong as it happens and a table, and writes benchmarks/results/faults.json with machine and commit.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

# One process is forked for each trial; nothing here may have started threads by then.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks import store
from benchmarks.machine import record
from tests.hostile.faults.disks import full_disk, full_disks
from tests.hostile.faults.kills import killed_at_change, kills
from tests.hostile.faults.memory import low_memory
from tests.hostile.faults.moments import spread, whole_run
from tests.hostile.faults.outcomes import Outcome, shown, table
from tests.hostile.faults.signals import long_prefill, signalled, signals
from tests.hostile.faults.subjects import READERS, SUBJECTS, Inputs
from tests.hostile.faults.trials import Folders, folders

PARTS = ("kills", "disks", "memory", "signals", "long prefill")


def main() -> int:
    """Run the parts; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.faults", description=__doc__)
    parser.add_argument("--select", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--kills", type=int, default=215, help="about so many: a short command has fewer moments")
    parser.add_argument("--disks", type=int, default=50)
    parser.add_argument("--limits", type=int, default=72, help="limits of memory")
    parser.add_argument("--signals", type=int, default=88)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a few fixed trials of each kind, and no record")
    options = parser.parse_args()
    if not options.short:
        import torch  # noqa: F401 - so that no trial has to load it
    started = time.monotonic()
    done: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="kvc-trt-faults-") as directory, folders() as where:
        os.environ["KVC_TRT_CACHE"] = str(Path(directory) / "cache")
        inputs = Inputs.make(Path(directory))
        chosen = {"short": lambda: short(inputs, where)} if options.short else trials(inputs, where, options)
        for part in chosen if options.short else options.select.split(","):
            done[part] = shown(part, chosen[part]())
    print(table(done))
    if options.short:
        return int(any(one.problems for one in done["short"]))
    machine = record()
    earlier = store.read(path) if (path := store.result_path("faults", machine)).exists() else {"machine": {}}
    parts = earlier if earlier["machine"].get("commit") == machine["commit"] else {}
    figures = {part: [asdict(one) for one in outcomes] for part, outcomes in done.items()}
    store.write(path, {**parts, **figures, "machine": machine, "seed": options.seed})
    print(f"{path}: {sum(map(len, done.values()))} trials in {time.monotonic() - started:.0f} s")
    return int(any(one.problems for outcomes in done.values() for one in outcomes))


def trials(inputs: Inputs, where: Folders, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Outcome]]]:
    """Return what makes each part's trials."""
    return {
        "kills": lambda: kills(inputs, where, options.kills, options.seed),
        "disks": lambda: full_disks(inputs, where, options.disks),
        "memory": lambda: low_memory(inputs, where, options.limits),
        "signals": lambda: signals(inputs, where, options.signals, options.seed),
        "long prefill": lambda: long_prefill(inputs, where),
    }


def short(inputs: Inputs, where: Folders) -> Iterator[Outcome]:
    """Try a few fixed moments of each kind, of commands that take little time."""
    for name, wanted in (("context save over another", 4), ("build over another", 3), ("export triton ensemble", 3)):
        changes, _ = whole_run(SUBJECTS[name], inputs, where)
        for moment in spread(changes, wanted):
            yield killed_at_change(SUBJECTS[name], inputs, where, moment, changes)
    yield full_disk(SUBJECTS["build"], inputs, where, 1000)
    yield full_disk(SUBJECTS["context save"], inputs, where, 64)
    yield signalled(READERS["run"], inputs, where, signal.SIGTERM, 0.1)
    yield signalled(SUBJECTS["build"], inputs, where, signal.SIGINT, 0.1)


if __name__ == "__main__":
    sys.exit(main())
