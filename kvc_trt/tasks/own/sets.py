"""The sets of a file as tasks: how their answers are scored, and how long these may be."""

from __future__ import annotations

from kvc_trt.tasks.own.reader import DataFile, Record
from kvc_trt.tasks.own.scores import FIRST_LINE, SCORES, score_named, scorer
from kvc_trt.tasks.task import ScoredBy, Task

FAMILY = "own data"


def tasks_of(data: DataFile) -> dict[str, Task]:
    """A task for each set, by its name."""
    return {name: _task(name, records) for name, records in data.sets.items()}


def _task(name: str, records: tuple[Record, ...]) -> Task:
    first = records[0]
    scored_by: ScoredBy = "answer"
    if first.answers is None:
        scored_by = "faithfulness"
    elif score_named(first.score).graded:
        scored_by = "overlap"
    return Task(
        name=name,
        family=FAMILY,
        summary=f"{len(records)} questions of a file",
        max_new_tokens=max(record.max_new_tokens for record in records),
        generate=None,
        score=None if first.answers is None else scorer(first.score, first.classes),
        scored=described(first),
        basis=scored_by,
        first_line=first.answers is not None and first.score.endswith(FIRST_LINE),
    )


def described(record: Record) -> str:
    """Return a description of the metric that scores answers to a record."""
    if record.answers is None:
        return "faithfulness to the whole cache"
    bare = record.score.removesuffix(FIRST_LINE)
    return SCORES[bare].summary + (", of its first line" if bare != record.score else "")
