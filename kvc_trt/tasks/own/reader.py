"""A file of one's own questions: JSON lines, read one line at a time and checked before anything is asked.

Each line is an object with `context` and `question`, or with `messages`, a conversation that ends with the question.
Everything else is optional: docs/data.md has the whole table. Lines that are scored alike form a set, which reports
show as one task. A line without `answers` is measured by how closely a compressed cache follows the whole one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import open_input
from kvc_trt.sizes import readable_size
from kvc_trt.tasks.own.scores import DEFAULT_SCORE, check_references, score_named
from kvc_trt.validation import OwnSchema, validated

LARGEST_DATA_FILE = 1 << 30
"""Bytes; all of LongBench has some 250 million."""
LONGEST_LINE = 32 << 20
"""Bytes: some eight million tokens."""
LONGEST_NAME = 80
"""Characters of an id or of the name of a set."""
MAX_NEW_TOKENS = 64
"""The longest answer where a line names none."""
MOST_NEW_TOKENS = 1 << 16
_BLANK_LINE = "\n\n"


@dataclass(frozen=True)
class Record:
    """One question of a file, checked."""

    line: int
    """Its line in the file, from 1."""
    id: str
    set: str
    context: str
    question: str
    messages: tuple[Mapping[str, str], ...] = ()
    """A conversation in place of context and question; it ends with a user's message."""
    answers: tuple[str, ...] | None = None
    """None: no right answers are given."""
    score: str = DEFAULT_SCORE
    classes: tuple[str, ...] = ()
    max_new_tokens: int = MAX_NEW_TOKENS
    template: bool = True
    """False: plain text, even where other questions go through the chat template."""

    @property
    def kind(self) -> tuple[str, str | None]:
        """The key that sets its records apart: the named set, and the score; None for those without answers."""
        return self.set, None if self.answers is None else self.score


@dataclass(frozen=True)
class DataFile:
    """The questions of a file."""

    path: Path
    digest: str
    """SHA-256 of its bytes, hexadecimal."""
    records: tuple[Record, ...]

    @cached_property
    def sets(self) -> dict[str, tuple[Record, ...]]:
        """The records by the name of their set, in the order of the file.

        Where lines of one name are scored in several ways, each way is a set: its name says which. InputError where
        that is the name of another set.
        """
        kinds: dict[tuple[str, str | None], list[Record]] = {}
        for record in self.records:
            kinds.setdefault(record.kind, []).append(record)
        ways, found = Counter(name for name, _ in kinds), dict[str, tuple[Record, ...]]()
        for (name, score), records in kinds.items():
            full = name if ways[name] == 1 else f"{name}-{score or 'unanswered'}"
            if full in found:
                raise InputError(
                    f"{self.path} line {records[0].line}: its set becomes {describe(full)}, as that of line "
                    f"{found[full][0].line} does",
                    hint='name another set: "set": "NAME"',
                )
            found[full] = tuple(records)
        return found


class _Message(OwnSchema):
    role: Literal["system", "user", "assistant"]
    content: str


_Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class _Line(OwnSchema):
    """One line, as it is written."""

    id: _Name | int | None = None
    set: _Name | None = None
    context: str | None = None
    question: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    answers: Annotated[list[str], Field(min_length=1)] | None = None
    score: str | None = None
    classes: Annotated[list[str], Field(min_length=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] | None = None
    template: bool = True


def read_data_file(path: str | os.PathLike[str]) -> DataFile:
    """The questions of a file; InputError names the first wrong line and the form expected there.

    No more than one line is read ahead, and a line longer than LONGEST_LINE is refused before it is in memory.
    """
    path = Path(path)
    digest = hashlib.sha256()
    records: list[Record] = []
    lines_by_id: dict[str, int] = {}
    first_of_kind: dict[tuple[str, str | None], Record] = {}
    for number, content in numbered_lines(path, LARGEST_DATA_FILE):
        digest.update(content)
        if not content.strip():
            continue
        source = f"{path} line {number}"
        record = _record(_parsed(content, source), number, source, path.stem)
        if (earlier := lines_by_id.setdefault(record.id, number)) != number:
            raise InputError(f"{source}: id {describe(record.id)} is that of line {earlier} too, expected another")
        first = first_of_kind.setdefault(record.kind, record)
        if first.classes != record.classes:
            raise InputError(
                f"{source}: classes are not those of line {first.line}, which is of the same set {describe(first.set)}",
                hint='name another set: "set": "NAME"',
            )
        records.append(record)
    if not records:
        raise InputError(f"{path} has no questions: expected JSON lines", hint='{"context": "...", "question": "..."}')
    return DataFile(path, digest.hexdigest(), tuple(records))


def line_of(record: Mapping[str, Any]) -> str:
    """The line of a file that says this, with its end."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def numbered_lines(path: Path, largest: int) -> Iterator[tuple[int, bytes]]:
    """Each line of a file with its number from 1; InputError for one that is longer than LONGEST_LINE."""
    with open_input(path, largest) as file, io.BufferedReader(file, 1 << 20) as reader:
        number = 0
        while content := reader.readline(LONGEST_LINE + 1):
            number += 1
            if len(content) > LONGEST_LINE:
                raise InputError(
                    f"{path} line {number}: longer than {readable_size(LONGEST_LINE)}, the most that one line may have",
                    hint="one question is one line; is the file JSON lines?",
                )
            yield number, content


def _parsed(content: bytes, source: str) -> object:
    try:
        found: object = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: byte {error.start} is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{source}: not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not JSON: {error}") from error
    return found


def _record(parsed: object, number: int, source: str, stem: str) -> Record:
    line = validated(_Line, parsed, source)
    _check_text(line, source)
    context, question = _asked(line, source)
    answers = None if line.answers is None else tuple(line.answers)
    classes = tuple(line.classes or ())
    score = DEFAULT_SCORE if line.score is None else line.score
    for name in ("score", "classes") if answers is None else ():
        if getattr(line, name) is not None:
            raise InputError(f"{source}: '{name}' without 'answers': there is nothing to score by")
    try:
        score_named(score)
        if answers is not None:
            check_references(score, answers, classes)
    except InputError as error:
        raise InputError(f"{source}: {error.message}", hint=error.hint) from error
    return Record(
        line=number,
        id=f"line {number}" if line.id is None else str(line.id),
        set=line.set or stem[:LONGEST_NAME],
        context=context,
        question=question,
        messages=tuple(message.model_dump() for message in line.messages or ()),
        answers=answers,
        score=score,
        classes=classes,
        max_new_tokens=line.max_new_tokens or MAX_NEW_TOKENS,
        template=line.template,
    )


def _asked(line: _Line, source: str) -> tuple[str, str]:
    """Context and question, which a blank line parts unless white space does; both empty for a conversation."""
    if line.messages is not None:
        if other := "context" if line.context is not None else "question" if line.question is not None else None:
            raise InputError(
                f"{source}: 'messages' and '{other}': expected a conversation, or a context and a question"
            )
        if not line.template:
            raise InputError(f"{source}: 'messages' without the template: nothing else says how they become a prompt")
        if line.messages[-1].role != "user" or not line.messages[-1].content.strip():
            raise InputError(f"{source}: the last message is no question: expected one of the role user, with content")
        return "", ""
    for name in ("context", "question"):
        if getattr(line, name) is None:
            raise InputError(f"{source}: missing key '{name}'", hint='expected "context" and "question", or "messages"')
    context, question = line.context or "", line.question or ""
    if not (context + question).strip():
        raise InputError(f"{source}: context and question are empty")
    parted = not context or not question or context[-1].isspace() or question[0].isspace()
    return context, question if parted else _BLANK_LINE + question


def _check_text(line: _Line, source: str) -> None:
    """InputError for halves of characters, which no tokenizer reads."""
    texts = [line.id, line.set, line.context, line.question, *(line.answers or ()), *(line.classes or ())]
    texts += [message.content for message in line.messages or ()]
    for text in texts:
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"{source}: holds half of a character (a lone surrogate)") from error
