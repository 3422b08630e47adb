"""Any table of texts and references: CNN/DailyMail, XSUM, SAMSum and others, by the names of their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.tasks.own.published.source import Line, table


@dataclass(frozen=True)
class Columns:
    """The columns of a row's text, references and question, or the `question` that is asked for every row."""

    context: str
    answers: str | None = None
    """The column of the references; None if no answer is known to be right."""
    asked: str | None = None
    """The column of the question; None if `question` is asked for every row."""
    question: str | None = None


def pairs(path: Path, columns: Columns, *, score: str | None, max_new_tokens: int | None) -> Iterator[Line]:
    """A question for each row of a file: JSON lines, a JSON list, or CSV with a header."""
    settings = {"score": score, "max_new_tokens": max_new_tokens}
    for where, row in table(path):
        line: Line = {"context": _text(row, columns.context, where)}
        line["question"] = _text(row, columns.asked, where) if columns.asked else columns.question
        if columns.answers is not None:
            line["answers"] = _references(row, columns.answers, where)
        yield line | {name: value for name, value in settings.items() if value is not None}


def _value(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise InputError(f"{where}: no {describe(column)}{did_you_mean(column, [str(one) for one in row])}")
    return row[column]


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    found = _value(row, column, where)
    if not isinstance(found, str):
        raise InputError(f"{where}: {describe(column)} is {describe(found)}, expected a text")
    return found


def _references(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    found = _value(row, column, where)
    texts = found if isinstance(found, list) else [found]
    if not texts or not all(isinstance(one, str) for one in texts):
        raise InputError(f"{where}: {describe(column)} is {describe(found)}, expected a text or a list of texts")
    return texts
