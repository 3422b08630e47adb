"""One process that feeds one kind its inputs, until the time is over; `campaign` starts it, watches it and ends it.

It writes what it counts to a board that both processes map, and each new kind of bad input to a file of lines, with the
smallest input that shows it. Where an input ends the process, the next process minimises it first.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from tests.fuzz.board import Board, mapped
from tests.fuzz.inputs import Inputs
from tests.fuzz.kind import Kind
from tests.fuzz.minimise import smaller, verdict_key_in_child
from tests.fuzz.verdict import Verdict, judge, limit_memory

ROOM = 3 << 30
"""Bytes of addresses that all inputs together may take beyond what the prepared process has."""


class Worker:
    """The loop over the inputs of one kind."""

    def __init__(self, kind: Kind, folder: Path, seed: int, minimising: float = 20.0) -> None:
        self._kind, self._folder = kind, folder
        self._inputs = Inputs(kind, seed)
        self.board: Board = mapped(folder / "board")
        self._minimising = minimising
        self._findings = folder / "findings.jsonl"
        lines = self._findings.read_text().splitlines() if self._findings.exists() else []
        self._known = {json.loads(line)["key"] for line in lines}

    def run(self, first: int, last: int, until: float) -> None:
        """Try the inputs from `first` up to `last`, or until a time of `time.monotonic`."""
        self.board.ready = 1
        parent = os.getppid()
        for number in range(first, last):
            if time.monotonic() >= until or os.getppid() != parent:
                break
            content = self._inputs[number]
            self.board.number, self.board.started = number, time.monotonic()
            verdict = judge(self._kind, content)
            if number < self._inputs.valid and verdict.kind == "refused":
                verdict = replace(verdict, kind="bad", key=f"valid input {number} is refused")
            self.board.started = 0.0
            self._count(number, verdict)
            if verdict.kind == "bad" and verdict.key not in self._known:
                self.record(number, content, verdict.key, verdict.message)

    def record(self, number: int, content: bytes, key: str, message: str) -> None:
        """Minimise a bad input and write it down."""
        alone = key.startswith(("crash", "takes too"))
        if key == "takes too long" and verdict_key_in_child(self._kind, content) != key:
            key = "took too long once"

        def is_still_bad(tried: bytes) -> bool:
            return (verdict_key_in_child(self._kind, tried) if alone else judge(self._kind, tried).key) == key

        shortest = content if key.startswith("valid") else smaller(content, is_still_bad, self._minimising)
        self._known.add(key)
        finding = {"kind": self._kind.name, "number": number, "key": key, "message": message}
        with self._findings.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**finding, "content": shortest.hex()}) + "\n")

    def record_ended(self, number: int, key: str) -> None:
        """Write down an input that ended the process before this one, or was ended with it."""
        self._count(number, Verdict("bad", 0.0, 0, key))
        if key not in self._known:
            self.record(number, self._inputs[number], key, "")

    def _count(self, number: int, verdict: Verdict) -> None:
        board = self.board
        board.inputs += 1
        setattr(board, verdict.kind, getattr(board, verdict.kind) + 1)
        if verdict.seconds > board.slowest:
            board.slowest, board.slowest_number = verdict.seconds, number
        if verdict.peak > board.peak:
            board.peak, board.peak_number = verdict.peak, number
        if verdict.comparison is not None:
            board.compared += 1
            if verdict.comparison.refused:
                board.only_ours += 1
                self._note_refusal(verdict.comparison.refused)

    def _note_refusal(self, reason: str) -> None:
        """Count why another reader refuses what ours accepts."""
        path = self._folder / "only_ours.json"
        counts = json.loads(path.read_text()) if path.exists() else {}
        counts[reason] = counts.get(reason, 0) + 1
        path.write_text(json.dumps(counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", metavar="MODULE:CLASS")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--minimising", type=float, default=20.0)
    parser.add_argument("--ended-by", metavar="KEY", help="how the input before the first ended the last process")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with (given.folder / "crashes.log").open("a") as crashes:
        faulthandler.enable(crashes)
        module, name = given.kind.split(":")
        kind = getattr(import_module(module), name)(given.folder)
        worker = Worker(kind, given.folder, given.seed, given.minimising)
        limit_memory(ROOM)
        if given.ended_by:
            worker.record_ended(given.first - 1, given.ended_by)
        worker.run(given.first, given.last, time.monotonic() + given.seconds)


if __name__ == "__main__":
    main()
