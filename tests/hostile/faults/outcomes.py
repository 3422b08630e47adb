"""The outcome of a trial, and the table of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvc_trt.progress import progress_on
from kvc_trt.tables import text_table


@dataclass(frozen=True)
class Outcome:
    """One trial: a command, what happened to it and when, and what was wrong then."""

    command: str
    moment: str
    problems: list[str]
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Measured figures: the exit code, seconds."""


def shown(part: str, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Show how many trials have ended, print each that went wrong on a line of its own, and return all."""
    done: list[Outcome] = []
    with progress_on().task(part, None) as advance:
        for outcome in outcomes:
            done.append(outcome)
            advance(1)
            for problem in outcome.problems:
                print(f"{part}: {outcome.command}, {outcome.moment}: {problem}", flush=True)
    return done


def table(parts: Mapping[str, list[Outcome]]) -> str:
    """Return a line per part and command: trials, and how many went wrong."""
    rows = []
    for part, outcomes in parts.items():
        for command in dict.fromkeys(one.command for one in outcomes):
            own = [one for one in outcomes if one.command == command]
            seconds = [one.figures["seconds"] for one in own if "seconds" in one.figures]
            longest = f"{max(seconds):.2f}" if seconds else ""
            rows.append((part, command, len(own), sum(bool(one.problems) for one in own), longest))
    return text_table(("part", "command", "trials", "went wrong", "longest, s"), rows, right=(2, 3, 4))
