"""Tamper with an engine between its check and its load: 10,000 times by `make tamper`, some 200 times in the tests.

Each trial opens an engine, changes one of its files, then loads the engine and asks it. What may happen: it is refused
in one line, before a runtime parses anything, or it answers as the untouched engine does. Anything else is `wrong`.

    python -m tests.hostile.tampering --count 10000 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvc_trt import Engine, build
from kvc_trt.errors import KvcError

PROMPT = "<record> lamp scarlet tiger lagos eight <query> lamp"


@dataclass
class Found:
    """The findings of the trials."""

    refused: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the figures."""
        counted = {"refused": self.refused.total(), "harmless": self.harmless.total(), "wrong": len(self.wrong)}
        return {**counted, "refused_by": self.refused, "harmless_by": self.harmless, "examples": self.wrong[:20]}


def flip(path: Path, chance: random.Random) -> None:
    """Change one bit in place."""
    with path.open("r+b") as file:
        place = chance.randrange(path.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def flip_and_set_back_the_time(path: Path, chance: random.Random) -> None:
    """Change one bit in place, and make the file look as old as before."""
    status = path.stat()
    flip(path, chance)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path, chance: random.Random) -> None:
    """Cut the file short."""
    os.truncate(path, chance.randrange(path.stat().st_size))


def append(path: Path, chance: random.Random) -> None:
    """Write behind the end."""
    with path.open("ab") as file:
        file.write(chance.randbytes(1 + chance.randrange(100)))


def replace(path: Path, chance: random.Random) -> None:
    """Put a changed copy in the file's place."""
    copy = Path(shutil.copy(path, path.parent.parent / "copy"))
    flip(copy, chance)
    copy.replace(path)


def swap(path: Path, chance: random.Random) -> None:
    """Let the file change places with another one."""
    other = chance.choice([one for one in _files(path.parent) if one != path] or [path])
    aside = path.parent.parent / "aside"
    path.rename(aside)
    if other != path:
        other.rename(path)
    aside.rename(other)


def link(path: Path, chance: random.Random) -> None:
    """Put a link to another file in the file's place."""
    path.unlink()
    path.symlink_to(chance.choice(["/etc/passwd", "/dev/zero", "nowhere", "config.json"]))


def pipe(path: Path, chance: random.Random) -> None:
    """Put a pipe in the file's place."""
    path.unlink()
    os.mkfifo(path)


def delete(path: Path, chance: random.Random) -> None:
    """Delete the file."""
    path.unlink()


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip, flip_and_set_back_the_time, truncate, append, replace, swap, link, pipe, delete,
)  # fmt: skip


@contextlib.contextmanager
def toggling(path: Path, chance: random.Random) -> Iterator[None]:
    """Change a byte of the file and change it back, again and again, while the block runs."""
    ending, place = threading.Event(), chance.randrange(path.stat().st_size)

    def toggle() -> None:
        with path.open("r+b", buffering=0) as file:
            right = os.pread(file.fileno(), 1, place)
            while not ending.is_set():
                os.pwrite(file.fileno(), bytes([right[0] ^ 255]), place)
                os.pwrite(file.fileno(), right, place)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


class Trials:
    """Tampers with copies of one engine in a directory."""

    def __init__(self, engine: Path, directory: Path) -> None:
        self._untouched, self._engine = engine, directory / "engine"
        self._names = [path.relative_to(engine) for path in _files(engine)]
        with Engine.open(engine, threads=1) as opened:
            self._expected = opened.generate(PROMPT).token_ids
        self.found = Found()

    def run(self, seed: int) -> None:
        """One trial; its seed decides all of it."""
        chance = random.Random(seed)
        name, races = chance.choice(self._names), chance.random() < 0.1
        kind = chance.choice(KINDS)
        backend = "torch" if chance.random() < 0.1 else None
        shutil.rmtree(self._engine, ignore_errors=True)
        shutil.copytree(self._untouched, self._engine)
        what = f"{'toggle' if races else kind.__name__} {name}"
        try:
            if races:
                with toggling(self._engine / name, chance):
                    engine = Engine.open(self._engine, backend=backend, threads=1)
                    engine.session()
            else:
                engine = Engine.open(self._engine, backend=backend, threads=1)
                kind(self._engine / name, chance)
            tokens = engine.generate(PROMPT).token_ids
        except KvcError as error:
            if "\n" in error.message:
                self.found.wrong.append(f"{seed}: {what}: several lines: {error.message}")
            self.found.refused[what] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.found.wrong.append(f"{seed}: {what}: {type(error).__name__}: {error}")
        else:
            if tokens == self._expected:
                self.found.harmless[what] += 1
            else:
                self.found.wrong.append(f"{seed}: {what}: other tokens")


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def main() -> None:
    """Run the trials and print what became of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        build("retrieval-tiny", token_budget=64, output=Path(name) / "untouched", verify=False)
        trials = Trials(Path(name) / "untouched", Path(name))
        for seed in range(given.seed, given.seed + given.count):
            trials.run(seed)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine = {"processor": platform.processor() or platform.machine(), "system": platform.platform()}
    figures = {"trials": given.count, "seed": given.seed, "seconds": round(time.monotonic() - started, 1)}
    print(json.dumps({**figures, **trials.found.as_json(), "commit": commit, "machine": machine}, indent=2))
    raise SystemExit(1 if trials.found.wrong else 0)


if __name__ == "__main__":
    main()
